import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import java.io.BufferedReader;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Base64;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;
import org.apache.rocketmq.broker.BrokerController;
import org.apache.rocketmq.broker.BrokerStartup;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyContext;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.impl.factory.MQClientInstance;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.namesrv.NamesrvStartup;
import org.apache.rocketmq.store.GetMessageResult;
import org.apache.rocketmq.store.MessageStore;

/**
 * A name server, one broker after the other, and their clients: whole, as RocketMQ starts them.
 *
 * <p>Reads one JSON command a line from stdin, {"do": ...}. Writes JSON lines to stdout: for each
 * command {"answer": ...} or {"error": ...}, and in between {"event": ...} for all that clients
 * see. Everything else goes to stderr or into RocketMQ's own logs. The end of stdin is the end.
 */
public final class BrokerHost {
    private static final Gson GSON =
        new GsonBuilder().disableHtmlEscaping().serializeNulls().create();
    private static final int HEARTBEAT_MS = 1_500; // until one came, pulls may be refused
    private static final int COMMIT_MS = 500;
    private static final int PULL = 32;
    private static final long ASK_MS = 10_000;
    private static final long ROUTE_NS = 90_000_000_000L;

    private final PrintStream answers;
    private final String namesrv;
    private final List<Runnable> clients = new ArrayList<>();
    private final Map<String, TransactionMQProducer> producers = new LinkedHashMap<>();
    private BrokerController broker;
    private int instances;

    private BrokerHost(PrintStream answers, String namesrv) {
        this.answers = answers;
        this.namesrv = namesrv;
    }

    /** Arguments: the address of the name server, and its file of properties. */
    public static void main(String[] args) throws Exception {
        PrintStream answers =
            new PrintStream(new FileOutputStream(FileDescriptor.out), false, "UTF-8");
        System.setOut(System.err); // whatever RocketMQ prints must not mix with the answers
        NamesrvStartup.main0(new String[] {"-c", args[1]});
        BrokerHost host = new BrokerHost(answers, args[0]);
        BufferedReader commands =
            new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = commands.readLine(); line != null; line = commands.readLine()) {
            try {
                host.say("answer", host.carryOut(JsonParser.parseString(line).getAsJsonObject()));
            } catch (Throwable wrong) {
                wrong.printStackTrace();
                host.say("error", wrong.toString());
            }
        }
        Runtime.getRuntime().halt(0); // its hooks would end what a test has ended already
    }

    private synchronized void say(String kind, Object what) {
        Map<String, Object> line = new LinkedHashMap<>();
        line.put(kind, what);
        answers.println(GSON.toJson(line));
        answers.flush();
    }

    private Object carryOut(JsonObject command) throws Exception {
        switch (command.get("do").getAsString()) {
            case "start":
                broker = BrokerStartup.createBrokerController(
                    new String[] {"-c", command.get("config").getAsString()});
                long end = broker.getMessageStore().getMaxPhyOffset(); // recovered; it writes on
                broker.start();
                awaitRoute(command.get("topic").getAsString());
                return end;
            case "consume":
                consume(command);
                return true;
            case "produce":
                answerChecks(command.get("group").getAsString(),
                    command.get("topic").getAsString());
                return true;
            case "send":
                return send(command);
            case "close":
                closeClients();
                return true;
            case "state":
                return state();
            case "lag":
                return lag(command.get("group").getAsString(), command.get("topic").getAsString());
            case "records":
                return records(command.get("topic").getAsString());
            case "stop":
                closeClients();
                broker.shutdown();
                return true;
            default:
                throw new IllegalArgumentException("no such command: " + command);
        }
    }

    /** A broker registers in its own time; RocketMQ offers nothing to wait on. */
    private void awaitRoute(String topic) throws Exception {
        long giveUp = System.nanoTime() + ROUTE_NS;
        while (true) {
            try {
                broker.getBrokerOuterAPI().getTopicRouteInfoFromNameServer(topic, ASK_MS);
                return;
            } catch (MQBrokerException notYet) {
                if (System.nanoTime() > giveUp) {
                    throw notYet;
                }
                Thread.sleep(20);
            }
        }
    }

    private void closeClients() {
        clients.forEach(Runnable::run);
        clients.clear();
        producers.clear();
    }

    private String instance() {
        return "host-" + instances++;
    }

    // Consumers: what they do with a message, its user properties say

    private void consume(JsonObject command) throws Exception {
        String group = command.get("group").getAsString();
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group);
        consumer.setNamesrvAddr(namesrv);
        consumer.setInstanceName(instance());
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setHeartbeatBrokerInterval(HEARTBEAT_MS);
        consumer.setPersistConsumerOffsetInterval(COMMIT_MS);
        if (command.has("maxReconsumeTimes")) {
            consumer.setMaxReconsumeTimes(command.get("maxReconsumeTimes").getAsInt());
        }
        consumer.setClientRebalance(!command.has("pop")); // else as the broker says: POP
        int holdLevel = command.has("holdLevel") ? command.get("holdLevel").getAsInt() : 0;
        JsonObject topics = command.getAsJsonObject("topics");
        for (String topic : topics.keySet()) {
            String sql = topics.get(topic).getAsString();
            if (sql.isEmpty()) {
                consumer.subscribe(topic, "*");
            } else {
                consumer.subscribe(topic, MessageSelector.bySql(sql));
            }
        }
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            boolean consumed = true;
            for (MessageExt message : messages) {
                consumed = isConsumed(message, context, holdLevel);
                Map<String, Object> event = shown(message);
                event.put("kind", consumed ? "consumed" : "failed");
                event.put("group", group);
                event.put("storedTopic", context.getMessageQueue().getTopic());
                say("event", event);
            }
            return consumed ? ConsumeConcurrentlyStatus.CONSUME_SUCCESS
                : ConsumeConcurrentlyStatus.RECONSUME_LATER;
        });
        consumer.start();
        clients.add(consumer::shutdown);
    }

    /** It fails `fails` times; and after those named in `holds` it is to wait by that level. */
    private static boolean isConsumed(
        MessageExt message, ConsumeConcurrentlyContext context, int holdLevel) {
        String fails = message.getUserProperty("fails");
        if (fails == null || message.getReconsumeTimes() >= Integer.parseInt(fails)) {
            return true;
        }
        String holds = message.getUserProperty("holds");
        String times = Integer.toString(message.getReconsumeTimes());
        if (holds != null && Arrays.asList(holds.split(",")).contains(times)) {
            context.setDelayLevelWhenNextConsume(holdLevel);
        }
        return false;
    }

    private static Map<String, Object> shown(MessageExt message) {
        Map<String, Object> shown = new LinkedHashMap<>();
        shown.put("topic", message.getTopic());
        shown.put("queueId", message.getQueueId());
        shown.put("queueOffset", message.getQueueOffset());
        shown.put("commitLogOffset", message.getCommitLogOffset());
        shown.put("reconsumeTimes", message.getReconsumeTimes());
        shown.put("bornTimestamp", message.getBornTimestamp());
        shown.put("storeTimestamp", message.getStoreTimestamp());
        shown.put("sysFlag", message.getSysFlag());
        shown.put("preparedTransactionOffset", message.getPreparedTransactionOffset());
        shown.put("properties", message.getProperties());
        byte[] body = message.getBody() == null ? new byte[0] : message.getBody();
        shown.put("body", Base64.getEncoder().encodeToString(body));
        return shown;
    }

    // A producer that the broker asks; the message's property `fate` is its answer

    @SuppressWarnings("deprecation") // there is no other way to the client of a producer
    private void answerChecks(String group, String topic) throws Exception {
        TransactionMQProducer producer = new TransactionMQProducer(group);
        producer.setNamesrvAddr(namesrv);
        producer.setInstanceName(instance());
        producer.setHeartbeatBrokerInterval(HEARTBEAT_MS);
        producer.setTransactionListener(new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object given) {
                return LocalTransactionState.UNKNOW;
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                Map<String, Object> event = shown(message);
                event.put("kind", "checked");
                event.put("group", group);
                say("event", event);
                return fate(message);
            }
        });
        producer.start();
        clients.add(producer::shutdown);
        producers.put(group, producer);
        // The broker asks whom it has heard of: those tell all brokers of topics that they know.
        MQClientInstance client = producer.getDefaultMQProducerImpl().getMqClientFactory();
        client.updateTopicRouteInfoFromNameServer(topic);
        client.sendHeartbeatToAllBrokerWithLock();
    }

    /** By a producer that is there: plain, by a delay level, after a time, or as half a message. */
    private Object send(JsonObject command) throws Exception {
        Message message = new Message(command.get("topic").getAsString(),
            command.get("body").getAsString().getBytes(StandardCharsets.UTF_8));
        JsonObject properties = command.getAsJsonObject("properties");
        properties.keySet().forEach(
            name -> message.putUserProperty(name, properties.get(name).getAsString()));
        TransactionMQProducer producer = producers.get(command.get("group").getAsString());
        SendResult sent;
        switch (command.get("how").getAsString()) {
            case "level":
                message.setDelayTimeLevel(command.get("level").getAsInt());
                sent = producer.send(message);
                break;
            case "after":
                message.setDelayTimeMs(command.get("ms").getAsLong());
                sent = producer.send(message);
                break;
            case "half":
                sent = producer.sendMessageInTransaction(message, null);
                break;
            default:
                sent = producer.send(message);
        }
        return sent.getSendStatus().name();
    }

    private static LocalTransactionState fate(MessageExt message) {
        switch (message.getUserProperty("fate")) {
            case "commit":
                return LocalTransactionState.COMMIT_MESSAGE;
            case "roll back":
                return LocalTransactionState.ROLLBACK_MESSAGE;
            default:
                return LocalTransactionState.UNKNOW;
        }
    }

    // What the broker has

    /** Each as it would stand in its file. */
    private Map<String, Object> state() {
        Map<String, Object> state = new LinkedHashMap<>();
        state.put("topics", broker.getTopicConfigManager().encode());
        state.put("groups", broker.getSubscriptionGroupManager().encode());
        state.put("offsets", broker.getConsumerOffsetManager().encode());
        state.put("delayOffsets", broker.getScheduleMessageService().encode());
        state.put("filters", broker.getConsumerFilterManager().encode());
        return state;
    }

    private Set<Integer> queues(String topic) {
        Map<Integer, ?> queues =
            broker.getMessageStore().getQueueStore().findConsumeQueueMap(topic);
        return queues == null ? Set.of() : new TreeSet<>(queues.keySet());
    }

    /** How many messages of a topic the group has not committed. */
    private long lag(String group, String topic) throws Exception {
        long lag = 0;
        for (int queueId : queues(topic)) {
            long committed = broker.getConsumerOffsetManager().queryOffset(group, topic, queueId);
            lag += broker.getMessageStore().getMaxOffsetInQueue(topic, queueId)
                - Math.max(committed, 0);
        }
        return lag;
    }

    /** All messages of a topic, by queue. */
    private List<Object> records(String topic) throws Exception {
        MessageStore store = broker.getMessageStore();
        List<Object> found = new ArrayList<>();
        for (int queueId : queues(topic)) {
            long at = store.getMinOffsetInQueue(topic, queueId);
            while (at < store.getMaxOffsetInQueue(topic, queueId)) {
                GetMessageResult got =
                    store.getMessage("host", topic, queueId, at, PULL, null);
                for (ByteBuffer record : got.getMessageBufferList()) {
                    found.add(shown(MessageDecoder.decode(record, true, false)));
                }
                got.release();
                if (got.getNextBeginOffset() <= at) {
                    throw new IllegalStateException(topic + " ends at " + at);
                }
                at = got.getNextBeginOffset();
            }
        }
        return found;
    }
}
