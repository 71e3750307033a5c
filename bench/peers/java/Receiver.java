import com.google.gson.JsonObject;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.BitSet;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.function.LongConsumer;

/** Takes every message that arrives, and knows afterwards what was wrong with them. One thread. */
final class Receiver {
    /** A sequence beyond this is rubbish, and would only ask for memory. */
    private static final long SEQUENCE_MAX = 1L << 31;

    private final long expect;
    private final long timeoutNs;
    private final int seed;
    private final long skip;
    /** If not 0, so many bodies come again and again, in one queue: what is not the next is wrong. */
    private final int again;
    private long next;
    private final LongConsumer latencies;
    private final Map<Integer, BitSet> seen = new HashMap<>();
    private long start;
    private long first;
    private long last;
    private long distinct;
    private long duplicates;
    private long outOfOrder;
    private long badCrc;
    private volatile long received;
    private volatile boolean stopped;

    // the queue of the message before, since messages come in runs
    private int topic = -1;
    private int queue = -1;
    private int producer = -1;
    private long[] at;
    private BitSet bits;
    private final Map<Long, long[]> lastOf = new HashMap<>();

    /** `skip`: sequences below this are of a warm-up, and give no latency. */
    Receiver(JsonObject job, long skip, int again, LongConsumer latencies) {
        expect = job.get("expect").getAsLong();
        seed = (int) job.get("seed").getAsLong();
        timeoutNs = (long) (job.get("timeout_s").getAsDouble() * 1e9);
        this.skip = skip;
        this.again = again;
        this.latencies = latencies;
    }

    void start() {
        start = System.nanoTime();
    }

    void stop() {
        stopped = true;
    }

    long received() {
        return received;
    }

    /** All is there, or enough was waited: `timeout_s` without a message, or an order to stop. */
    boolean finished() {
        boolean some = received > 0; // read first: what was written before it is seen too
        if (stopped || some && distinct >= expect) {
            return true;
        }
        return System.nanoTime() - Math.max(start, last) > timeoutNs;
    }

    void take(byte[] body, int topic, int queue) {
        long now = System.nanoTime();
        if (received++ == 0) {
            first = now;
        }
        last = now;
        ByteBuffer stamp = ByteBuffer.wrap(body).order(ByteOrder.LITTLE_ENDIAN);
        if (!whole(body, stamp)) {
            badCrc++;
            return;
        }
        long intended = stamp.getLong(0);
        if (intended > 0 && stamp.getLong(8) >= skip) {
            latencies.accept(now - intended);
        }
        place(stamp.getLong(8), stamp.getInt(16), topic, queue);
    }

    private boolean whole(byte[] body, ByteBuffer stamp) {
        return body.length >= Bodies.STAMP_BYTES
            && Bodies.crc(body, 0, 28) == stamp.getInt(28)
            && Bodies.crc(body, Bodies.STAMP_BYTES, body.length - Bodies.STAMP_BYTES)
                == stamp.getInt(24)
            && stamp.getInt(20) == seed
            && stamp.getLong(8) >= 0 && stamp.getLong(8) < SEQUENCE_MAX;
    }

    private void place(long sequence, int from, int topic, int queue) {
        if (again > 0) {
            distinct++;
            outOfOrder += sequence == next ? 0 : 1;
            next = (sequence + 1) % again;
            return;
        }
        if (from != producer || queue != this.queue || topic != this.topic) {
            producer = from;
            this.topic = topic;
            this.queue = queue;
            at = lastOf.computeIfAbsent(key(), key -> new long[] {-1});
            bits = seen.computeIfAbsent(from, key -> new BitSet());
        }
        if (bits.get((int) sequence)) {
            duplicates++;
            return;
        }
        bits.set((int) sequence);
        distinct++;
        if (sequence < at[0]) {
            outOfOrder++;
        } else {
            at[0] = sequence;
        }
    }

    /** Producer numbers below 2^28, topics below 2^18, queues below 2^17. */
    private long key() {
        return (long) producer << 35 | (long) topic << 17 | queue;
    }

    Map<String, Object> result() {
        Map<String, Object> result = new LinkedHashMap<>();
        result.put("received", received);
        result.put("distinct", distinct);
        result.put("duplicates", duplicates);
        result.put("out_of_order", outOfOrder);
        result.put("bad_crc", badCrc);
        result.put("lost", Math.max(0, expect - distinct));
        result.put("seconds", received > 0 ? (last - start) / 1e9 : 0.0);
        result.put("first_ns", first);
        result.put("last_ns", last);
        return result;
    }
}
