import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import java.io.File;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.net.Inet6Address;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.SocketAddress;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.TreeMap;
import java.util.concurrent.ConcurrentHashMap;
import java.util.zip.CRC32;
import org.apache.rocketmq.common.BoundaryType;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.MixAll;
import org.apache.rocketmq.common.UtilAll;
import org.apache.rocketmq.common.compression.CompressionType;
import org.apache.rocketmq.common.compression.CompressorFactory;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageExtBrokerInner;
import org.apache.rocketmq.common.sysflag.MessageSysFlag;
import org.apache.rocketmq.logging.ch.qos.logback.classic.Level;
import org.apache.rocketmq.logging.ch.qos.logback.classic.Logger;
import org.apache.rocketmq.logging.ch.qos.logback.classic.LoggerContext;
import org.apache.rocketmq.logging.org.slf4j.LoggerFactory;
import org.apache.rocketmq.remoting.protocol.filter.FilterAPI;
import org.apache.rocketmq.store.DefaultMessageFilter;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.DispatchRequest;
import org.apache.rocketmq.store.GetMessageResult;
import org.apache.rocketmq.store.GetMessageStatus;
import org.apache.rocketmq.store.MessageFilter;
import org.apache.rocketmq.store.PutMessageResult;
import org.apache.rocketmq.store.QueryMessageResult;
import org.apache.rocketmq.store.SelectMappedBufferResult;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.apache.rocketmq.store.queue.ConsumeQueueInterface;
import org.apache.rocketmq.store.queue.CqUnit;
import org.apache.rocketmq.store.stats.BrokerStatsManager;

/**
 * Opens a store directory with RocketMQ's own store, and says what that finds in it.
 *
 * <p>Reads one JSON request from stdin: {"mode": "list" | "append" | "leave-open", "storeDir": ...,
 * "settings": {MessageStoreConfig's own names}, "queries": {...}, "append": {...}}. Writes JSON
 * lines to stdout: one a message (or one an acknowledged put), at the end one {"summary": ...}.
 * Everything that RocketMQ logs goes to stderr. Exit code 3: the store refused the directory.
 */
public final class StoreLister {
    private static final Gson GSON =
        new GsonBuilder().disableHtmlEscaping().serializeNulls().create();
    private static final int REFUSED = 3;
    private static final long DISPATCH_TIMEOUT_MS = 60_000;
    private static final String GROUP = "interop";

    private final PrintStream answers;
    private final JsonObject request;
    private final DefaultMessageStore store;
    private final Map<String, Object> summary = new LinkedHashMap<>();
    /** Positions in the log of all that getMessage returned. */
    private final Set<Long> seen = new HashSet<>();
    private final List<Object> unreadable = new ArrayList<>();

    private StoreLister(PrintStream answers, JsonObject request) throws Exception {
        this.answers = answers;
        this.request = request;
        BrokerConfig brokerConfig = new BrokerConfig();
        store = new DefaultMessageStore(config(request), new BrokerStatsManager(brokerConfig),
            (topic, queueId, offset, tagsCode, time, bitMap, properties) -> { },
            brokerConfig, new ConcurrentHashMap<>());
    }

    public static void main(String[] args) throws Exception {
        PrintStream answers =
            new PrintStream(new FileOutputStream(FileDescriptor.out), false, "UTF-8");
        System.setOut(System.err); // whatever RocketMQ prints must not mix with the answers
        logWarningsOnly();
        JsonObject request = JsonParser.parseReader(
            new InputStreamReader(System.in, StandardCharsets.UTF_8)).getAsJsonObject();
        int code = 1;
        try {
            code = new StoreLister(answers, request).run();
        } catch (Throwable wrong) {
            wrong.printStackTrace();
        }
        answers.flush();
        System.exit(code); // the statistics keep threads that are not daemons
    }

    private static void logWarningsOnly() {
        LoggerContext context = (LoggerContext) LoggerFactory.getILoggerFactory();
        for (Logger logger : context.getLoggerList()) {
            boolean root = logger.getName().equals(Logger.ROOT_LOGGER_NAME);
            logger.setLevel(root ? Level.WARN : null);
        }
    }

    private static MessageStoreConfig config(JsonObject request) {
        MessageStoreConfig config = new MessageStoreConfig();
        Properties known = MixAll.object2Properties(config);
        Properties wanted = new Properties();
        JsonObject settings = request.getAsJsonObject("settings");
        for (Map.Entry<String, JsonElement> setting : settings.entrySet()) {
            // RocketMQ passes over names it does not know; a test that relies on one must not
            if (!known.containsKey(setting.getKey())) {
                throw new IllegalArgumentException("no such setting: " + setting.getKey());
            }
            wanted.setProperty(setting.getKey(), setting.getValue().getAsString());
        }
        config.setStorePathRootDir(request.get("storeDir").getAsString());
        config.setHaListenPort(0);
        config.setTimerWheelEnable(false);
        config.setEnableCompaction(false);
        // nothing may be deleted, be it for its age or for want of space
        config.setCleanFileForciblyEnable(false);
        config.setFileReservedTime(100 * 365 * 24);
        MixAll.properties2Object(wanted, config);
        return config;
    }

    private int run() throws Exception {
        File root = new File(request.get("storeDir").getAsString());
        summary.put("lastExitOk", !new File(root, "abort").exists());
        if (!store.load()) {
            System.err.println("load() returned false");
            return REFUSED;
        }
        summary.put("queuesAfterLoad", queues());
        try {
            store.start();
        } catch (Exception refused) { // another process holds the store's lock
            refused.printStackTrace();
            return REFUSED;
        }
        awaitDispatch();
        String mode = request.get("mode").getAsString();
        if (mode.equals("list")) {
            list();
        } else {
            append(request.getAsJsonObject("append"));
        }
        if (mode.equals("leave-open")) {
            finish();
            Runtime.getRuntime().halt(0); // no shutdown hook, no flush: a process that died
        }
        awaitDispatch(); // shutdown keeps `abort` while the queues lag behind the log
        store.shutdown();
        summary.put("abortLeft", new File(root, "abort").exists());
        finish();
        return 0;
    }

    private void finish() {
        answers.println(GSON.toJson(Map.of("summary", summary)));
        answers.flush();
    }

    /** RocketMQ offers nothing to wait on here, so this looks again every few milliseconds. */
    private void awaitDispatch() throws InterruptedException {
        long giveUp = System.currentTimeMillis() + DISPATCH_TIMEOUT_MS;
        while (store.dispatchBehindBytes() > 0) {
            if (System.currentTimeMillis() > giveUp) {
                throw new IllegalStateException("dispatch is behind by "
                    + store.dispatchBehindBytes() + " bytes");
            }
            Thread.sleep(2);
        }
    }

    // What the store holds

    private void list() throws Exception {
        for (ConsumeQueueInterface queue : sortedQueues()) {
            listQueue(queue);
        }
        summary.put("logReadTo", listRest());
        summary.put("minPhyOffset", store.getMinPhyOffset());
        summary.put("maxPhyOffset", store.getMaxPhyOffset());
        summary.put("queues", queues());
        summary.put("unreadable", unreadable);
        if (request.has("queries")) {
            summary.put("queries", answerAll(request.getAsJsonObject("queries")));
        }
    }

    private List<ConsumeQueueInterface> sortedQueues() {
        List<ConsumeQueueInterface> queues = new ArrayList<>();
        new TreeMap<>(store.getConsumeQueueTable()).values()
            .forEach(ofTopic -> queues.addAll(new TreeMap<>(ofTopic).values()));
        return queues;
    }

    private List<Object> queues() throws Exception {
        List<Object> queues = new ArrayList<>();
        for (ConsumeQueueInterface queue : sortedQueues()) {
            Map<String, Object> one = new LinkedHashMap<>();
            one.put("topic", queue.getTopic());
            one.put("queueId", queue.getQueueId());
            one.put("minOffset", store.getMinOffsetInQueue(queue.getTopic(), queue.getQueueId()));
            one.put("maxOffset", store.getMaxOffsetInQueue(queue.getTopic(), queue.getQueueId()));
            queues.add(one);
        }
        return queues;
    }

    /** Asks for each queue offset by itself: a larger pull passes over what it cannot read. */
    private void listQueue(ConsumeQueueInterface queue) throws Exception {
        String topic = queue.getTopic();
        int queueId = queue.getQueueId();
        long end = store.getMaxOffsetInQueue(topic, queueId);
        for (long at = store.getMinOffsetInQueue(topic, queueId); at < end; at++) {
            GetMessageResult got = store.getMessage(GROUP, topic, queueId, at, 1, null);
            boolean found = got != null && got.getStatus() == GetMessageStatus.FOUND
                && got.getMessageQueueOffset().get(0) == at;
            if (found) {
                SelectMappedBufferResult record = got.getMessageMapedList().get(0);
                seen.add(record.getStartOffset());
                writeMessage(record.getStartOffset(), record.getByteBuffer(), queue.get(at));
            } else {
                Map<String, Object> missing = new LinkedHashMap<>();
                missing.put("topic", topic);
                missing.put("queueId", queueId);
                missing.put("queueOffset", at);
                missing.put("status", got == null ? null : got.getStatus().name());
                unreadable.add(missing);
            }
            if (got != null) {
                got.release();
            }
        }
    }

    /** Walks the log, writes the records that no queue has, and returns how far it came. */
    private long listRest() {
        long at = Math.max(0, store.getMinPhyOffset());
        while (at < store.getMaxPhyOffset()) {
            SelectMappedBufferResult chunk = store.getCommitLogData(at);
            if (chunk == null) {
                return at;
            }
            try {
                long next = listChunk(at, chunk.getByteBuffer());
                if (next < 0) {
                    return ~next;
                }
                at = next;
            } finally {
                chunk.release();
            }
        }
        return at;
    }

    /** Returns where the next segment starts, or the complement of the place of a bad record. */
    private long listChunk(long start, ByteBuffer chunk) {
        while (chunk.hasRemaining()) {
            int from = chunk.position();
            DispatchRequest checked =
                store.getCommitLog().checkMessageAndReturnSize(chunk, false, false, true);
            if (!checked.isSuccess()) {
                return ~(start + from);
            }
            if (checked.getMsgSize() == 0) { // the blank that fills a segment
                return store.getCommitLog().rollNextFile(start + from);
            }
            if (!seen.contains(start + from)) {
                ByteBuffer record = chunk.duplicate();
                record.position(from).limit(from + checked.getMsgSize());
                writeMessage(start + from, record.slice(), null);
            }
            chunk.position(from + checked.getMsgSize());
        }
        return start + chunk.limit();
    }

    private void writeMessage(long position, ByteBuffer record, CqUnit unit) {
        MessageExt message = MessageDecoder.decode(record.duplicate(), true, false);
        if (message == null) {
            throw new IllegalStateException("MessageDecoder cannot read the record at " + position);
        }
        Map<String, Object> line = new LinkedHashMap<>();
        line.put("topic", message.getTopic());
        line.put("queueId", message.getQueueId());
        line.put("queueOffset", message.getQueueOffset());
        line.put("physicalOffset", message.getCommitLogOffset());
        line.put("storeSize", message.getStoreSize());
        line.put("sysFlag", message.getSysFlag());
        line.put("flag", message.getFlag());
        line.put("bornTimestamp", message.getBornTimestamp());
        line.put("bornHost", address(message.getBornHost()));
        line.put("storeTimestamp", message.getStoreTimestamp());
        line.put("storeHost", address(message.getStoreHost()));
        line.put("reconsumeTimes", message.getReconsumeTimes());
        line.put("preparedTransactionOffset", message.getPreparedTransactionOffset());
        line.put("bodyCRC", message.getBodyCRC());
        // the decoder leaves them null, like an empty body, where the record has none
        Map<String, String> properties = message.getProperties();
        line.put("properties", properties == null ? Map.of() : properties);
        line.put("msgId", message.getMsgId());
        line.put("magic", Integer.toHexString(record.getInt(4)));
        line.put("recordCrc32", crc32(record));
        putBody(line, message, record);
        line.put("cq", unit == null ? null : entry(unit));
        if (position != message.getCommitLogOffset()) {
            line.put("foundAt", position);
        }
        answers.println(GSON.toJson(line));
    }

    private static void putBody(Map<String, Object> line, MessageExt message, ByteBuffer record) {
        byte[] body = message.getBody() == null ? new byte[0] : message.getBody();
        line.put("body", base64(body));
        if (body.length > 0 && UtilAll.crc32(body) != message.getBodyCRC()) {
            line.put("bodyCrcOk", false);
        }
        if ((message.getSysFlag() & MessageSysFlag.COMPRESSED_FLAG) != 0) {
            MessageExt whole = MessageDecoder.decode(record.duplicate(), true, true);
            line.put("bodyDecompressed", whole == null ? null : base64(whole.getBody()));
        }
    }

    private static Map<String, Object> entry(CqUnit unit) {
        Map<String, Object> entry = new LinkedHashMap<>();
        entry.put("index", unit.getQueueOffset());
        entry.put("pos", unit.getPos());
        entry.put("size", unit.getSize());
        entry.put("tagsCode", unit.getTagsCode());
        return entry;
    }

    private static String base64(byte[] bytes) {
        return Base64.getEncoder().encodeToString(bytes);
    }

    private static long crc32(ByteBuffer record) {
        CRC32 crc = new CRC32();
        crc.update(record.duplicate());
        return crc.getValue();
    }

    private static String address(SocketAddress socketAddress) {
        InetSocketAddress host = (InetSocketAddress) socketAddress;
        String ip = host.getAddress().getHostAddress();
        boolean v6 = host.getAddress() instanceof Inet6Address;
        return (v6 ? "[" + ip + "]" : ip) + ":" + host.getPort();
    }

    // Queries: each comes back with its arguments and the answer

    private Map<String, Object> answerAll(JsonObject queries) throws Exception {
        Map<String, Object> all = new LinkedHashMap<>();
        for (Map.Entry<String, JsonElement> kind : queries.entrySet()) {
            List<Object> answered = new ArrayList<>();
            for (JsonElement query : kind.getValue().getAsJsonArray()) {
                answered.add(answer(kind.getKey(), query.getAsJsonObject()));
            }
            all.put(kind.getKey(), answered);
        }
        return all;
    }

    private JsonObject answer(String kind, JsonObject query) throws Exception {
        switch (kind) {
            case "queryMessage":
                return queryMessage(query.deepCopy());
            case "getMessage":
                return getMessage(query.deepCopy());
            case "getOffsetInQueueByTime":
                return getOffsetInQueueByTime(query.deepCopy());
            default:
                throw new IllegalArgumentException("no such query: " + kind);
        }
    }

    private JsonObject queryMessage(JsonObject query) {
        QueryMessageResult got = store.queryMessage(query.get("topic").getAsString(),
            query.get("key").getAsString(), query.get("maxNum").getAsInt(),
            query.get("begin").getAsLong(), query.get("end").getAsLong());
        JsonArray offsets = new JsonArray();
        got.getMessageMapedList().forEach(record -> offsets.add(record.getStartOffset()));
        query.add("physicalOffsets", offsets);
        query.addProperty("indexLastUpdateTimestamp", got.getIndexLastUpdateTimestamp());
        query.addProperty("indexLastUpdatePhyoffset", got.getIndexLastUpdatePhyoffset());
        got.release();
        return query;
    }

    private JsonObject getMessage(JsonObject query) throws Exception {
        String topic = query.get("topic").getAsString();
        MessageFilter filter = query.get("tags").isJsonNull() ? null : new DefaultMessageFilter(
            FilterAPI.buildSubscriptionData(topic, query.get("tags").getAsString()));
        GetMessageResult got = store.getMessage(GROUP, topic, query.get("queueId").getAsInt(),
            query.get("offset").getAsLong(), query.get("maxMsgNums").getAsInt(), filter);
        query.addProperty("status", got.getStatus().name());
        query.addProperty("nextBeginOffset", got.getNextBeginOffset());
        query.addProperty("minOffset", got.getMinOffset());
        query.addProperty("maxOffset", got.getMaxOffset());
        query.addProperty("messageCount", got.getMessageCount());
        query.addProperty("bufferTotalSize", got.getBufferTotalSize());
        query.add("queueOffsets", GSON.toJsonTree(got.getMessageQueueOffset()));
        got.release();
        return query;
    }

    private JsonObject getOffsetInQueueByTime(JsonObject query) {
        long offset = store.getOffsetInQueueByTime(query.get("topic").getAsString(),
            query.get("queueId").getAsInt(), query.get("timestamp").getAsLong(),
            BoundaryType.getType(query.get("boundary").getAsString()));
        query.addProperty("offset", offset);
        return query;
    }

    // Going on with the store

    private void append(JsonObject wanted) throws Exception {
        String topic = wanted.get("topic").getAsString();
        int queues = wanted.get("queues").getAsInt();
        int index = 0;
        for (JsonElement body : wanted.getAsJsonArray("bodies")) {
            byte[] bytes = Base64.getDecoder().decode(body.getAsString());
            int sysFlag = 0;
            if (wanted.has("compress")) {
                CompressionType type = CompressionType.of(wanted.get("compress").getAsString());
                bytes = CompressorFactory.getCompressor(type).compress(bytes, 5);
                sysFlag = MessageSysFlag.COMPRESSED_FLAG | type.getCompressionFlag();
            }
            MessageExtBrokerInner message = message(topic, index, index % queues, bytes);
            message.setSysFlag(message.getSysFlag() | sysFlag);
            PutMessageResult put = store.putMessage(message);
            if (!put.isOk()) {
                throw new IllegalStateException("put " + index + " answered " + put);
            }
            Map<String, Object> line = new LinkedHashMap<>();
            line.put("topic", topic);
            line.put("queueId", message.getQueueId());
            line.put("queueOffset", put.getAppendMessageResult().getLogicsOffset());
            line.put("physicalOffset", put.getAppendMessageResult().getWroteOffset());
            line.put("storeSize", put.getAppendMessageResult().getWroteBytes());
            line.put("storeTimestamp", put.getAppendMessageResult().getStoreTimestamp());
            line.put("msgId", put.getAppendMessageResult().getMsgId());
            line.put("body", body);
            line.put("properties", message.getProperties());
            answers.println(GSON.toJson(line));
            index++;
        }
    }

    private static MessageExtBrokerInner message(String topic, int index, int queueId, byte[] body)
        throws Exception {
        MessageExtBrokerInner message = new MessageExtBrokerInner();
        message.setTopic(topic);
        message.setQueueId(queueId);
        message.setBody(body);
        message.setTags("tag" + index % 3);
        message.setKeys("key" + index);
        MessageAccessor.putProperty(message,
            MessageConst.PROPERTY_UNIQ_CLIENT_MESSAGE_ID_KEYIDX, String.format("%032X", index));
        message.setTagsCode(MessageExtBrokerInner.tagsString2tagsCode(message.getTags()));
        message.setPropertiesString(
            MessageDecoder.messageProperties2String(message.getProperties()));
        message.setBornTimestamp(System.currentTimeMillis());
        message.setBornHost(host(8, 50_000));
        message.setStoreHost(host(9, 10_911));
        return message;
    }

    private static InetSocketAddress host(int last, int port) throws Exception {
        byte[] ip = {10, 0, 0, (byte) last};
        return new InetSocketAddress(InetAddress.getByAddress(ip), port);
    }
}
