import com.google.gson.Gson;
import com.google.gson.JsonArray;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import com.sun.management.OperatingSystemMXBean;
import java.io.BufferedReader;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.management.ManagementFactory;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.atomic.AtomicReference;
import java.util.concurrent.locks.LockSupport;
import org.HdrHistogram.Histogram;
import org.HdrHistogram.HistogramLogWriter;
import org.HdrHistogram.Recorder;

/**
 * What the Java workers of all peers share: the lines of JSON, the schedule, the window of messages
 * in flight, histograms, verification. A peer's own file says how to send, and how to receive.
 *
 * <p>Reads its job from the first line of stdin and {"go":true} from the second, and answers with
 * JSON lines on stdout; see cometmq.bench.systems.
 */
abstract class Worker {
    /** What becomes of one message, or of one batch; called once, in any thread. */
    interface Done {
        void acknowledged();

        void failed(Throwable why);
    }

    static final long HIGHEST_NS = 60_000_000_000L;
    private static final Gson GSON = new Gson();
    /** Bodies that are ready before the clock starts: no more than this at a time. */
    private static final long GROUP_BYTES = 256L << 20;
    /** Threads of one producer have numbers this far apart, since each has its own sequence. */
    private static final int THREAD_STEP = 1 << 16;
    private static final long ANSWERS_TIMEOUT_S = 120;
    private static final int INTERVAL_S = 10;
    /** From the go to the first intended time. */
    private static final long START_NS = 20_000_000;

    private static PrintStream answers;

    JsonObject job;
    JsonObject endpoint;
    JsonObject options;
    String[] topics;
    int queues;
    int size;
    int inFlight;
    int batch;
    String mode;
    private int producer;
    private double rate;
    private boolean spread;
    private boolean windowed;
    private Bodies bodies;

    private final AtomicLong acked = new AtomicLong();
    private final AtomicLong failures = new AtomicLong();
    private final AtomicReference<Throwable> firstFailure = new AtomicReference<>();
    private final Latencies service = new Latencies();
    private final Latencies response = new Latencies();
    private volatile boolean measuring;
    private boolean settles;
    private long settledNs;
    /** Of the first measured send; 0: in open loop. */
    private final AtomicLong firstNs = new AtomicLong();
    private boolean recording;
    private String hlog;
    private volatile boolean stopped;
    private Receiver receiver;

    // What a peer's worker adds

    /** The client's name and version. */
    abstract String client() throws Exception;

    abstract void openProducer() throws Exception;

    /** Sends without waiting; blocks at most for as long as the client itself does. */
    abstract void send(int topic, int queue, byte[] body, Done done) throws Exception;

    abstract void sendAndWait(int topic, int queue, byte[] body) throws Exception;

    /** Sends all to one queue, in the client's own way of batches. */
    abstract void sendBatch(int topic, int queue, List<byte[]> group, Done done) throws Exception;

    /** Returns when subscribed and positioned; hands nothing over before `consume`. */
    abstract void openConsumer(String group) throws Exception;

    /** Gives all that arrives to the receiver until that is finished. */
    abstract void consume(Receiver receiver) throws Exception;

    abstract void close() throws Exception;

    /** A batch of the wanted count that the server takes; fewer where its size has a limit. */
    int largestBatch(int wanted) {
        return wanted;
    }

    /** Whether each call is answered when it returns, so that nothing is ever on its way. */
    boolean direct() {
        return false;
    }

    /** Waits for what the calls have left to be done behind them; false = there is no such thing. */
    boolean settle() throws Exception {
        return false;
    }

    /** Jobs beyond produce and consume. */
    Map<String, Object> other(String role) throws Exception {
        throw new IllegalArgumentException("this worker knows no role " + role);
    }

    // The conversation

    static void run(Worker worker) {
        answers = new PrintStream(new FileOutputStream(FileDescriptor.out), true,
            StandardCharsets.UTF_8);
        System.setOut(System.err); // what a client prints must not mix with the answers
        int code = 1;
        try {
            worker.converse();
            code = 0;
        } catch (Throwable wrong) {
            wrong.printStackTrace();
            answer(Map.of("error", sentence(wrong)));
        }
        Runtime.getRuntime().halt(code); // clients keep threads that are not daemons
    }

    private static String sentence(Throwable wrong) {
        String what = wrong.getMessage() == null ? wrong.toString()
            : wrong.getClass().getSimpleName() + ": " + wrong.getMessage();
        return what.replace('\n', ' ');
    }

    static synchronized void answer(Object line) {
        answers.println(GSON.toJson(line));
    }

    private void converse() throws Exception {
        BufferedReader lines =
            new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        read(JsonParser.parseString(lines.readLine()).getAsJsonObject());
        Map<String, Object> result;
        String role = job.get("role").getAsString();
        switch (role) {
            case "produce":
                openProducer();
                bodies = new Bodies(size, job.get("seed").getAsLong());
                awaitGo(lines);
                result = produce();
                break;
            case "consume":
                receiver = new Receiver(job, option("skip", 0), option("again", 0), response::record);
                openConsumer(job.get("group").getAsString());
                awaitGo(lines);
                result = consumed();
                break;
            default:
                awaitGo(lines);
                result = other(role);
        }
        close();
        answer(Map.of("result", result));
    }

    private void read(JsonObject given) {
        job = given;
        endpoint = job.getAsJsonObject("endpoint");
        options = job.has("options") ? job.getAsJsonObject("options") : new JsonObject();
        JsonArray names = job.has("topics") ? job.getAsJsonArray("topics") : new JsonArray();
        topics = new String[names.size()];
        for (int i = 0; i < topics.length; i++) {
            topics[i] = names.get(i).getAsString();
        }
        queues = number("queues", 1);
        size = number("size", 128);
        inFlight = number("in_flight", 64);
        rate = job.has("rate") ? job.get("rate").getAsDouble() : 0;
        spread = option("spread", false);
        windowed = option("window", false);
        producer = number("producer", 0);
        mode = job.has("mode") ? job.get("mode").getAsString() : "async";
        batch = mode.equals("batch") ? largestBatch(number("batch", 256)) : 1;
        hlog = job.has("hlog") && !job.get("hlog").isJsonNull() ? job.get("hlog").getAsString() : "";
        recording = !hlog.isEmpty() && (rate > 0 || mode.equals("one_in_flight"));
    }

    int number(String name, int otherwise) {
        return job.has(name) ? job.get(name).getAsInt() : otherwise;
    }

    int option(String name, int otherwise) {
        return options.has(name) ? options.get(name).getAsInt() : otherwise;
    }

    /** Also false, 0 and null are no. */
    boolean option(String name, boolean otherwise) {
        if (!options.has(name)) {
            return otherwise;
        }
        String given = options.get(name).toString();
        return !given.equals("false") && !given.equals("0") && !given.equals("null");
    }

    /** Settings of the client by its own names: those of the peer, then those of this job. */
    Map<String, String> clientSettings() {
        boolean consumes = job.get("role").getAsString().equals("consume");
        String phase = consumes ? "consume" : rate > 0 ? "open_loop" : mode;
        Map<String, String> settings = new LinkedHashMap<>();
        JsonObject ours = endpoint.getAsJsonObject("settings").getAsJsonObject("java");
        put(settings, ours.getAsJsonObject(phase));
        put(settings, options.getAsJsonObject(consumes ? "consumer" : "producer"));
        return settings;
    }

    private static void put(Map<String, String> settings, JsonObject given) {
        if (given != null) {
            given.entrySet().forEach(
                one -> settings.put(one.getKey(), one.getValue().getAsString()));
        }
    }

    private void awaitGo(BufferedReader lines) throws Exception {
        answer(Map.of("ready", true));
        String line = lines.readLine();
        if (line == null) {
            throw new IllegalStateException("stdin was closed before the go");
        }
        daemon("orders", () -> {
            while (lines.readLine() != null) {
                stopped = true;
                if (receiver != null) {
                    receiver.stop();
                }
            }
            Runtime.getRuntime().halt(1); // whoever gave the job is gone
            return null;
        });
        daemon("progress", () -> {
            for (int second = 1; ; second++) {
                Thread.sleep(1000);
                answer(Map.of("progress", receiver == null ? acked.get() : receiver.received()));
                if (second % INTERVAL_S == 0) {
                    service.turn();
                    response.turn();
                }
            }
        });
    }

    static void daemon(String name, java.util.concurrent.Callable<Object> loop) {
        Thread thread = new Thread(() -> {
            try {
                loop.call();
            } catch (Exception wrong) {
                wrong.printStackTrace();
            }
        }, name);
        thread.setDaemon(true);
        thread.start();
    }

    // Producing

    private Map<String, Object> produce() throws Exception {
        long warmup = number("warmup", 0);
        long messages = job.get("messages").getAsLong();
        runAll(0, warmup);
        settledNs = 0;
        acked.set(0); // failures of the warm-up count: its messages are expected too
        measuring = true;
        long cpu = cpuNs();
        long ns = runAll(warmup, messages);
        Map<String, Object> result = new LinkedHashMap<>();
        result.put("acked", acked.get());
        result.put("failed", failures.get());
        result.put("seconds", ns / 1e9);
        result.put("cpu_s", (cpuNs() - cpu) / 1e9);
        result.put("service_hlog", write("service", service));
        result.put("response_hlog", write("response", response));
        result.put("client", client());
        Map<String, Object> extra = new LinkedHashMap<>();
        if (firstNs.get() != 0) {
            extra.put("first_ns", firstNs.get());
        }
        if (settles) {
            extra.put("dispatched_after_s", settledNs / 1e9);
        }
        result.put("extra", extra);
        if (firstFailure.get() != null) {
            result.put("first_failure", sentence(firstFailure.get()));
        }
        return result;
    }

    /** Messages `from` and on, `count` of them. Returns the time they took, in ns. */
    private long runAll(long from, long count) throws Exception {
        int threads = threads();
        if (threads == 1) {
            return runOne(new Sequence(producer, from), count);
        }
        return runThreads(threads, from, count);
    }

    /** How many threads send at the same time, each with one message in flight. */
    int threads() {
        return option("threads", 1);
    }

    private long runThreads(int threads, long from, long count) throws Exception {
        CountDownLatch finished = new CountDownLatch(threads);
        AtomicReference<Throwable> wrong = new AtomicReference<>();
        long start = System.nanoTime();
        for (int i = 0; i < threads; i++) {
            Sequence sequence = new Sequence(producer + i * THREAD_STEP, share(from, i, threads));
            long mine = share(from + count, i, threads) - share(from, i, threads);
            daemon("sender-" + i, () -> {
                try {
                    runOne(sequence, mine);
                } catch (Throwable why) {
                    wrong.compareAndSet(null, why);
                }
                finished.countDown();
                return null;
            });
        }
        finished.await();
        if (wrong.get() != null) {
            throw new IllegalStateException(wrong.get());
        }
        long ns = System.nanoTime() - start;
        awaitSettled();
        return ns;
    }

    private void awaitSettled() throws Exception {
        long start = System.nanoTime();
        settles = settle();
        settledNs += System.nanoTime() - start;
    }

    private static long share(long all, int index, int threads) {
        return all / threads + (index < all % threads ? 1 : 0);
    }

    /** The numbers that one sender gives: its own, and that of its next message. */
    private record Sequence(int number, long from) { }

    private long runOne(Sequence sequence, long count) throws Exception {
        Window window = new Window();
        return rate > 0 ? scheduled(sequence, count, window) : saturated(sequence, count, window);
    }

    /** As fast as it goes, with bodies made beforehand, in groups: the clock stands in between. */
    private long saturated(Sequence sequence, long count, Window window) throws Exception {
        int again = option("again", 0);
        long group = again > 0 ? count
            : Math.max(batch, Math.min(count, GROUP_BYTES / (size + 64) / threads()));
        group -= group % batch;
        long ns = 0;
        for (long at = 0; at < count; at += group) {
            long now = Math.min(group, count - at);
            List<byte[]> made = new ArrayList<>();
            for (int i = 0; i < (again > 0 ? again : now); i++) {
                made.add(bodies.make(0, again > 0 ? i : sequence.from + at + i, sequence.number));
            }
            System.gc(); // or bodies are moved from one generation to the next while the clock runs
            long start = System.nanoTime();
            if (measuring) {
                firstNs.compareAndSet(0, start);
            }
            if (direct()) {
                handOver(sequence.from + at, made, now);
            } else {
                for (int i = 0; i < now; i += batch) {
                    hand(sequence.from + at + i, made.subList(i, (int) Math.min(i + batch, now)),
                        window, 0);
                }
            }
            window.awaitAll();
            ns += System.nanoTime() - start;
            if (threads() == 1) {
                awaitSettled();
            }
        }
        return ns;
    }

    /** One call after the other, and nothing beside it. Bodies that are fewer come again. */
    private void handOver(long from, List<byte[]> made, long count) throws Exception {
        int size = made.size();
        int which = option("again", 0) > 0 ? (int) (from % size) : 0;
        for (long i = 0; i < count; i++) {
            long turn = from + i;
            int topic = (int) (turn % topics.length);
            sendAndWait(topic, (int) (turn / topics.length % queues), made.get(which));
            which = which + 1 < size ? which + 1 : 0;
        }
        acked.addAndGet(count);
    }

    /** Open loop: message i is due at start + i/rate, whatever became of those before it. */
    private long scheduled(Sequence sequence, long count, Window window) throws Exception {
        exactTimers();
        double interval = 1e9 / rate * threads();
        long start = System.nanoTime() + START_NS;
        for (long i = 0; i < count && !stopped; i++) {
            long due = start + (long) (i * interval);
            awaitTime(due);
            byte[] body = bodies.make(due, sequence.from + i, sequence.number);
            hand(sequence.from + i, Collections.singletonList(body), window, due);
        }
        window.awaitAll();
        return System.nanoTime() - start;
    }

    private static void awaitTime(long until) {
        long left;
        while ((left = until - System.nanoTime()) > 0) {
            LockSupport.parkNanos(left);
        }
    }

    /** The kernel lets timers be 50 us late, unless asked. */
    private static void exactTimers() {
        try {
            String thread = Files.readSymbolicLink(Path.of("/proc/thread-self")).getFileName()
                .toString();
            Files.writeString(Path.of("/proc", thread, "timerslack_ns"), "1");
        } catch (Exception refused) {
            System.err.println("timers stay 50 us coarse: " + refused);
        }
    }

    /**
     * Messages, or batches, go to the topics in turn; with `spread` also to a topic's queues, else
     * the client chooses one (-1).
     */
    private void hand(long sequence, List<byte[]> group, Window window, long due)
            throws Exception {
        long turn = sequence / batch;
        int topic = (int) (turn % topics.length);
        int queue = spread || queues == 1 ? (int) (turn / topics.length % queues) : -1;
        One done = new One(window, group.size(), due);
        if (mode.equals("one_in_flight") || threads() > 1) {
            try {
                sendAndWait(topic, queue, group.get(0));
                done.acknowledged();
            } catch (Exception why) {
                done.failed(why);
            }
        } else if (mode.equals("batch") && rate == 0) {
            sendBatch(topic, queue, group, done);
        } else {
            send(topic, queue, group.get(0), done);
        }
    }

    /** As many messages may be unanswered as the client allows itself. */
    int windowMax() {
        return Integer.MAX_VALUE;
    }

    /** Lets so many messages be on their way, or one batch; with `window` it is `in_flight`. */
    private final class Window {
        private final int limit = !mode.equals("batch") || rate > 0
            ? windowed && rate == 0 ? inFlight : windowMax()
            : windowed ? Math.max(1, inFlight / batch) : 1;
        private final Semaphore free = new Semaphore(limit);

        void enter() throws InterruptedException {
            if (!free.tryAcquire(ANSWERS_TIMEOUT_S, TimeUnit.SECONDS)) {
                throw new IllegalStateException("no answer for " + ANSWERS_TIMEOUT_S + " s");
            }
        }

        void awaitAll() throws InterruptedException {
            if (!free.tryAcquire(limit, ANSWERS_TIMEOUT_S, TimeUnit.SECONDS)) {
                throw new IllegalStateException("no answer for " + ANSWERS_TIMEOUT_S + " s");
            }
            free.release(limit);
        }
    }

    private final class One implements Done {
        private final Window window;
        private final int messages;
        private final long due;
        private final long sent;

        /** Waits for its place in the window. `due`: when it was to be sent; 0 = now. */
        One(Window window, int messages, long due) throws InterruptedException {
            window.enter();
            this.window = window;
            this.messages = messages;
            this.due = due;
            sent = recording ? System.nanoTime() : 0;
        }

        @Override
        public void acknowledged() {
            acked.addAndGet(messages);
            if (recording && measuring) {
                long now = System.nanoTime();
                service.record(now - sent);
                if (due > 0) {
                    response.record(now - due);
                }
            }
            window.free.release();
        }

        @Override
        public void failed(Throwable why) {
            if (firstFailure.compareAndSet(null, why)) {
                why.printStackTrace();
            }
            failures.addAndGet(messages);
            window.free.release();
        }
    }

    /** Nanoseconds from any thread, a histogram for every ten seconds. */
    private static final class Latencies {
        private final Recorder recorder = new Recorder(1, HIGHEST_NS, 3);
        private final List<Histogram> intervals = new ArrayList<>();

        void record(long ns) {
            recorder.recordValue(Math.max(1, Math.min(HIGHEST_NS, ns)));
        }

        synchronized void turn() {
            Histogram interval = recorder.getIntervalHistogram();
            if (interval.getTotalCount() > 0) {
                intervals.add(interval);
            }
        }

        synchronized List<Histogram> all() {
            turn();
            return intervals;
        }
    }

    // Consuming

    private Map<String, Object> consumed() throws Exception {
        long cpu = cpuNs();
        receiver.start();
        consume(receiver);
        Map<String, Object> result = receiver.result();
        result.put("cpu_s", (cpuNs() - cpu) / 1e9);
        result.put("hlog", write("end_to_end", response));
        result.put("client", client());
        return result;
    }

    static long cpuNs() {
        return ((OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean())
            .getProcessCpuTime();
    }

    /** All values are in ns, those of the column of maxima too. */
    private String write(String what, Latencies latencies) throws Exception {
        List<Histogram> all = latencies.all();
        if (hlog.isEmpty() || all.isEmpty()) {
            return null;
        }
        String path = hlog + "." + what + ".hlog";
        HistogramLogWriter log = new HistogramLogWriter(path);
        log.outputLogFormatVersion();
        log.outputComment("[Values: nanoseconds]");
        log.outputLegend();
        for (Histogram interval : all) {
            log.outputIntervalHistogram(interval.getStartTimeStamp() / 1e3,
                interval.getEndTimeStamp() / 1e3, interval, 1.0);
        }
        log.close();
        return path;
    }
}
