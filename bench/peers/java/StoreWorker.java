import java.io.File;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.SocketAddress;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.MQVersion;
import org.apache.rocketmq.common.MixAll;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExtBatch;
import org.apache.rocketmq.common.message.MessageExtBrokerInner;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.GetMessageResult;
import org.apache.rocketmq.store.GetMessageStatus;
import org.apache.rocketmq.store.PutMessageResult;
import org.apache.rocketmq.store.PutMessageStatus;
import org.apache.rocketmq.store.config.FlushDiskType;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.apache.rocketmq.store.stats.BrokerStatsManager;

/**
 * RocketMQ's store in this process, without a broker: DefaultMessageStore with its dispatch running.
 *
 * <p>Under SYNC_FLUSH the mode `async` has `in_flight` threads, each with one call at a time. The
 * role `recover` opens the store and says how long that took.
 */
final class StoreWorker extends Worker {
    private static final int READ_COUNT = 1024;
    /** Before the body's length in a record with IPv4 hosts. RocketMQ MessageDecoder. */
    private static final int BODY_SIZE_POSITION = 84;
    private static final int BATCH_BYTES = 4_000_000;
    private static final long DISPATCH_TIMEOUT_NS = 120_000_000_000L;
    private static final SocketAddress HOST =
        new InetSocketAddress(InetAddress.getLoopbackAddress(), 10911);

    private DefaultMessageStore store;
    private MessageStoreConfig config;
    private int[] turns;
    private double loaded;

    public static void main(String[] args) {
        run(new StoreWorker());
    }

    @Override
    String client() {
        return "rocketmq-store " + MQVersion.getVersionDesc(MQVersion.CURRENT_VERSION);
    }

    private MessageStoreConfig config() {
        // RocketMQ logs below it, from its first class on
        System.setProperty("user.home", endpoint.get("folder").getAsString() + ".logs");
        MessageStoreConfig made = new MessageStoreConfig();
        Properties known = MixAll.object2Properties(made);
        Properties wanted = new Properties();
        endpoint.getAsJsonObject("settings").entrySet().forEach(
            one -> wanted.setProperty(one.getKey(), one.getValue().getAsString()));
        for (String name : wanted.stringPropertyNames()) {
            // RocketMQ passes over names it does not know
            if (!known.containsKey(name)) {
                throw new IllegalArgumentException("no such setting of a store: " + name);
            }
        }
        made.setStorePathRootDir(endpoint.get("folder").getAsString());
        made.setHaListenPort(0);
        MixAll.properties2Object(wanted, made);
        return made;
    }

    private void open() throws Exception {
        config = config();
        BrokerConfig broker = new BrokerConfig();
        long start = System.nanoTime();
        store = new DefaultMessageStore(config, new BrokerStatsManager(broker),
            (topic, queueId, offset, tagsCode, time, bitMap, properties) -> { },
            broker, new ConcurrentHashMap<>());
        if (!store.load()) {
            throw new IllegalStateException("the store does not load");
        }
        store.start();
        loaded = (System.nanoTime() - start) / 1e9;
    }

    @Override
    int threads() {
        boolean waits = config.getFlushDiskType() == FlushDiskType.SYNC_FLUSH;
        return option("threads", waits && mode.equals("async") ? inFlight : 1);
    }

    @Override
    int largestBatch(int wanted) {
        return Math.max(1, Math.min(wanted, BATCH_BYTES / (size + 100)));
    }

    @Override
    void openProducer() throws Exception {
        open();
        turns = new int[topics.length];
    }

    /** The caller of a store chooses the queue. */
    private int choose(int topic, int queue) {
        return queue >= 0 ? queue : (turns[topic]++ & Integer.MAX_VALUE) % queues;
    }

    private <T extends MessageExtBrokerInner> T filled(T message, int topic, int queue) {
        message.setTopic(topics[topic]);
        message.setQueueId(choose(topic, queue));
        message.setBornTimestamp(System.currentTimeMillis());
        message.setBornHost(HOST);
        message.setStoreHost(HOST);
        // As the broker does: the store looks into them.
        MessageAccessor.setProperties(message, new HashMap<>());
        message.setPropertiesString("");
        return message;
    }

    private static void check(PutMessageResult result) {
        if (result.getPutMessageStatus() != PutMessageStatus.PUT_OK) {
            throw new IllegalStateException("the store said " + result.getPutMessageStatus());
        }
    }

    @Override
    void sendAndWait(int topic, int queue, byte[] body) {
        MessageExtBrokerInner message = filled(new MessageExtBrokerInner(), topic, queue);
        message.setBody(body);
        check(store.putMessage(message));
    }

    @Override
    void send(int topic, int queue, byte[] body, Done done) {
        try {
            sendAndWait(topic, queue, body);
            done.acknowledged();
        } catch (IllegalStateException why) {
            done.failed(why);
        }
    }

    @Override
    void sendBatch(int topic, int queue, List<byte[]> group, Done done) {
        List<Message> messages = new ArrayList<>(group.size());
        for (byte[] body : group) {
            messages.add(new Message(topics[topic], body));
        }
        MessageExtBatch batch = filled(new MessageExtBatch(), topic, queue);
        batch.setBody(MessageDecoder.encodeMessages(messages));
        try {
            check(store.putMessages(batch));
            done.acknowledged();
        } catch (IllegalStateException why) {
            done.failed(why);
        }
    }

    @Override
    boolean direct() {
        return mode.equals("async") && threads() == 1;
    }

    /** Until all is dispatched, and with `durable` on the disk. */
    @Override
    boolean settle() throws Exception {
        awaitDispatch();
        while (option("durable", false)
                && store.getCommitLog().getFlushedWhere() < store.getMaxPhyOffset()) {
            store.flush(); // one file of its log at a time
        }
        return true;
    }

    /** RocketMQ offers nothing to wait on here, so this looks again every few milliseconds. */
    private void awaitDispatch() throws Exception {
        long giveUp = System.nanoTime() + DISPATCH_TIMEOUT_NS;
        while (store.dispatchBehindBytes() > 0) {
            if (System.nanoTime() > giveUp) {
                throw new IllegalStateException("dispatch is " + store.dispatchBehindBytes()
                    + " bytes behind");
            }
            Thread.sleep(1);
        }
    }

    @Override
    void openConsumer(String group) throws Exception {
        open();
        awaitDispatch();
    }

    @Override
    void consume(Receiver receiver) throws Exception {
        long[][] next = new long[topics.length][queues];
        while (!receiver.finished()) {
            boolean some = false;
            for (int topic = 0; topic < topics.length; topic++) {
                for (int queue = 0; queue < queues; queue++) {
                    some |= read(receiver, topic, queue, next);
                }
            }
            if (!some) {
                Thread.sleep(1);
            }
        }
    }

    private boolean read(Receiver receiver, int topic, int queue, long[][] next) {
        GetMessageResult found = store.getMessage("bench", topics[topic], queue,
            next[topic][queue], READ_COUNT, null);
        if (found == null) {
            return false;
        }
        try {
            for (ByteBuffer record : found.getMessageBufferList()) {
                byte[] body = new byte[record.getInt(BODY_SIZE_POSITION)];
                record.get(BODY_SIZE_POSITION + 4, body);
                receiver.take(body, topic, queue);
            }
            next[topic][queue] = found.getNextBeginOffset();
            return found.getStatus() == GetMessageStatus.FOUND;
        } finally {
            found.release();
        }
    }

    @Override
    Map<String, Object> other(String role) throws Exception {
        if (!role.equals("recover")) {
            return super.other(role);
        }
        boolean clean = !new File(endpoint.get("folder").getAsString(), "abort").exists();
        open();
        Map<String, Object> result = new LinkedHashMap<>();
        result.put("seconds", loaded);
        result.put("clean", clean);
        result.put("bytes", store.getMaxPhyOffset());
        result.put("client", client());
        return result;
    }

    @Override
    void close() {
        store.shutdown();
    }
}
