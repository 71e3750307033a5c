import com.google.gson.Gson;
import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
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
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.atomic.AtomicReference;
import java.util.concurrent.locks.LockSupport;
import org.HdrHistogram.ConcurrentHistogram;
import org.HdrHistogram.Histogram;
import org.HdrHistogram.HistogramLogWriter;

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
    private long rate;
    private Bodies bodies;

    private final AtomicLong acked = new AtomicLong();
    private final AtomicLong failures = new AtomicLong();
    private final AtomicReference<Throwable> firstFailure = new AtomicReference<>();
    private final Histogram service = new ConcurrentHistogram(1, HIGHEST_NS, 3);
    private final Histogram response = new ConcurrentHistogram(1, HIGHEST_NS, 3);
    private volatile boolean measuring;
    private volatile boolean recording;
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
        String role = job.get("role").getAsString();
        switch (role) {
            case "produce":
                openProducer();
                makeBodies();
                awaitGo(lines);
                answer(Map.of("result", produce()));
                break;
            case "consume":
                receiver = new Receiver(job, HIGHEST_NS);
                openConsumer(job.get("group").getAsString());
                awaitGo(lines);
                answer(Map.of("result", consumed()));
                break;
            default:
                answer(Map.of("ready", true));
                lines.readLine();
                answer(Map.of("result", other(role)));
        }
        close();
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
        rate = number("rate", 0);
        producer = number("producer", 0);
        mode = job.has("mode") ? job.get("mode").getAsString() : "async";
        batch = mode.equals("batch") ? largestBatch(number("batch", 256)) : 1;
        recording = rate > 0 || job.has("hlog") && !job.get("hlog").isJsonNull();
    }

    int number(String name, int otherwise) {
        return job.has(name) ? job.get(name).getAsInt() : otherwise;
    }

    int option(String name, int otherwise) {
        return options.has(name) ? options.get(name).getAsInt() : otherwise;
    }

    /** Settings of the client by its own names, which go before ours. */
    Map<String, String> clientSettings() {
        Map<String, String> settings = new LinkedHashMap<>();
        if (options.has("client")) {
            for (Map.Entry<String, JsonElement> one : options.getAsJsonObject("client").entrySet()) {
                settings.put(one.getKey(), one.getValue().getAsString());
            }
        }
        return settings;
    }

    private void awaitGo(BufferedReader lines) throws Exception {
        answer(Map.of("ready", true));
        String line = lines.readLine();
        if (line == null) {
            throw new IllegalStateException("stdin was closed before the go");
        }
        daemon("orders", () -> {
            while (lines.readLine() != null) {
                if (receiver != null) {
                    receiver.stop();
                }
            }
            Runtime.getRuntime().halt(1); // whoever gave the job is gone
            return null;
        });
        daemon("progress", () -> {
            while (true) {
                Thread.sleep(1000);
                answer(Map.of("progress", receiver == null ? acked.get() : receiver.received()));
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

    private void makeBodies() {
        bodies = new Bodies(size, job.get("seed").getAsLong());
    }

    private Map<String, Object> produce() throws Exception {
        long warmup = number("warmup", 0);
        long messages = job.get("messages").getAsLong();
        runAll(0, warmup);
        acked.set(0);
        failures.set(0);
        measuring = true;
        long cpu = cpuNs();
        long ns = runAll(warmup, messages);
        Map<String, Object> result = new LinkedHashMap<>();
        result.put("acked", acked.get());
        result.put("failed", failures.get());
        result.put("seconds", ns / 1e9);
        result.put("cpu_s", (cpuNs() - cpu) / 1e9);
        result.put("service_hlog", recording ? write("service", service) : null);
        result.put("response_hlog", rate > 0 ? write("response", response) : null);
        result.put("client", client());
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
        return System.nanoTime() - start;
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
        int group = (int) Math.max(batch, Math.min(count, GROUP_BYTES / (size + 64) / threads()));
        group -= group % batch;
        long ns = 0;
        for (long at = 0; at < count; at += group) {
            int now = (int) Math.min(group, count - at);
            List<byte[]> made = new ArrayList<>(now);
            for (int i = 0; i < now; i++) {
                made.add(bodies.make(0, sequence.from + at + i, sequence.number));
            }
            long start = System.nanoTime();
            for (int i = 0; i < now; i += batch) {
                hand(sequence.from + at + i, made.subList(i, Math.min(i + batch, now)), window, null);
            }
            window.awaitAll();
            ns += System.nanoTime() - start;
        }
        return ns;
    }

    /** Open loop: message i is due at start + i/rate, whatever became of those before it. */
    private long scheduled(Sequence sequence, long count, Window window) throws Exception {
        exactTimers();
        double interval = 1e9 / rate * threads();
        long start = System.nanoTime() + 1_000_000;
        for (long i = 0; i < count; ) {
            awaitTime(start + (long) (i * interval));
            long due = Math.min(count, (long) ((System.nanoTime() - start) / interval) + 1);
            int now = (int) Math.max(1, Math.min(batch, due - i));
            List<byte[]> made = new ArrayList<>(now);
            long[] intended = new long[now];
            for (int k = 0; k < now; k++) {
                intended[k] = start + (long) ((i + k) * interval);
                // a warm-up is not to be in the consumers' histograms
                made.add(bodies.make(measuring ? intended[k] : 0, sequence.from + i + k,
                    sequence.number));
            }
            hand(sequence.from + i, made, window, intended);
            i += now;
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

    /** Messages, or batches, go round robin over the topics, and in each over its queues. */
    private void hand(long sequence, List<byte[]> group, Window window, long[] intended)
            throws Exception {
        long turn = sequence / batch;
        int topic = (int) (turn % topics.length);
        int queue = (int) (turn / topics.length % queues);
        if (mode.equals("one_in_flight") || threads() > 1) {
            One done = new One(window, 1, intended, false);
            try {
                sendAndWait(topic, queue, group.get(0));
                done.acknowledged();
            } catch (Exception why) {
                done.failed(why);
            }
        } else if (mode.equals("async")) {
            window.enter();
            send(topic, queue, group.get(0), new One(window, 1, intended, true));
        } else {
            window.enter();
            // the list is a view of bodies that stay as they are
            sendBatch(topic, queue, group, new One(window, group.size(), intended, true));
        }
    }

    /** Lets `in_flight` messages be on their way; in batch mode as many batches as hold them. */
    private final class Window {
        private final int limit = Math.max(1, inFlight / batch);
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
        private final long[] intended;
        private final boolean windowed;
        private final long sent = recording ? System.nanoTime() : 0;

        One(Window window, int messages, long[] intended, boolean windowed) {
            this.window = window;
            this.messages = messages;
            this.intended = intended;
            this.windowed = windowed;
        }

        @Override
        public void acknowledged() {
            acked.addAndGet(messages);
            if (recording && measuring) {
                record(System.nanoTime());
            }
            leave();
        }

        private void record(long now) {
            service.recordValueWithCount(Math.min(HIGHEST_NS, now - sent), messages);
            if (intended != null) {
                for (long due : intended) {
                    response.recordValue(Math.min(HIGHEST_NS, now - due));
                }
            }
        }

        @Override
        public void failed(Throwable why) {
            if (firstFailure.compareAndSet(null, why)) {
                why.printStackTrace();
            }
            failures.addAndGet(messages);
            leave();
        }

        private void leave() {
            if (windowed) {
                window.free.release();
            }
        }
    }

    // Consuming

    private Map<String, Object> consumed() throws Exception {
        long cpu = cpuNs();
        receiver.start();
        consume(receiver);
        Map<String, Object> result = receiver.result();
        result.put("cpu_s", (cpuNs() - cpu) / 1e9);
        result.put("hlog", receiver.latencies().getTotalCount() > 0
            ? write("end_to_end", receiver.latencies()) : null);
        result.put("client", client());
        return result;
    }

    static long cpuNs() {
        return ((OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean())
            .getProcessCpuTime();
    }

    /** One interval with everything; values in ns, the column of maxima too. */
    private String write(String what, Histogram histogram) throws Exception {
        if (!job.has("hlog") || job.get("hlog").isJsonNull()) {
            return null;
        }
        String path = job.get("hlog").getAsString() + "." + what + ".hlog";
        HistogramLogWriter log = new HistogramLogWriter(path);
        log.outputLogFormatVersion();
        log.outputLegend();
        histogram.setStartTimeStamp(0);
        histogram.setEndTimeStamp(1000);
        log.outputIntervalHistogram(0.0, 1.0, histogram.copy(), 1.0);
        log.close();
        return path;
    }
}
