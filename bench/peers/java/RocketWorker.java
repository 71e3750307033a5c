import java.lang.reflect.Method;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collection;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.stream.Collectors;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.MQVersion;
import org.apache.rocketmq.common.MixAll;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** Apache RocketMQ's own client (remoting). Its settings are in cometmq.bench.peers.rocketmq. */
@SuppressWarnings("deprecation") // consumeFromWhere and others have no successor for this consumer
class RocketWorker extends Worker {
    private static final long READY_MS = 60_000;
    /** The broker takes 4 MiB; what lies around each body of a batch is below 100 bytes. */
    private static final int BATCH_BYTES = 4_000_000;
    private static final int WINDOW = 1024;

    private DefaultMQProducer producer;
    private DefaultMQPushConsumer consumer;
    private MessageQueue[][] places;
    private final Map<String, Integer> numbers = new HashMap<>();
    private final CountDownLatch go = new CountDownLatch(1);
    private final CountDownLatch end = new CountDownLatch(1);
    /** The go comes in another thread than the messages. */
    private volatile Receiver receiver;

    public static void main(String[] args) {
        run(new RocketWorker());
    }

    @Override
    String client() {
        return "rocketmq-client " + MQVersion.getVersionDesc(MQVersion.CURRENT_VERSION);
    }

    final void settle(Object client) {
        Properties wanted = new Properties();
        clientSettings().forEach(wanted::setProperty);
        Set<String> known = Arrays.stream(client.getClass().getMethods()).map(Method::getName)
            .collect(Collectors.toSet());
        for (String name : wanted.stringPropertyNames()) {
            // RocketMQ passes over names it does not know
            if (!known.contains("set" + name.substring(0, 1).toUpperCase() + name.substring(1))) {
                throw new IllegalArgumentException("no such setting: " + name);
            }
        }
        MixAll.properties2Object(wanted, client);
    }

    @Override
    int largestBatch(int wanted) {
        return Math.max(1, Math.min(wanted, BATCH_BYTES / (size + 100)));
    }

    @Override
    int windowMax() {
        return WINDOW;
    }

    @Override
    void openProducer() throws Exception {
        producer = new DefaultMQProducer("bench-" + number("producer", 0));
        producer.setNamesrvAddr(endpoint.get("namesrv").getAsString());
        settle(producer);
        producer.start();
        places = new MessageQueue[topics.length][];
        for (int i = 0; i < topics.length; i++) {
            List<MessageQueue> queues = producer.fetchPublishMessageQueues(topics[i]);
            places[i] = queues.toArray(new MessageQueue[0]);
            Arrays.sort(places[i]);
        }
    }

    static void check(SendResult result) {
        if (result.getSendStatus() != SendStatus.SEND_OK) {
            throw new IllegalStateException("the broker answered " + result.getSendStatus());
        }
    }

    private static SendCallback told(Done done) {
        return new SendCallback() {
            @Override
            public void onSuccess(SendResult result) {
                try {
                    check(result);
                    done.acknowledged();
                } catch (IllegalStateException why) {
                    done.failed(why);
                }
            }

            @Override
            public void onException(Throwable why) {
                done.failed(why);
            }
        };
    }

    @Override
    void send(int topic, int queue, byte[] body, Done done) throws Exception {
        Message message = new Message(topics[topic], body);
        if (queue < 0) {
            producer.send(message, told(done));
        } else {
            producer.send(message, places[topic][queue], told(done));
        }
    }

    @Override
    void sendAndWait(int topic, int queue, byte[] body) throws Exception {
        Message message = new Message(topics[topic], body);
        check(queue < 0 ? producer.send(message) : producer.send(message, places[topic][queue]));
    }

    @Override
    void sendBatch(int topic, int queue, List<byte[]> group, Done done) throws Exception {
        Collection<Message> messages = new ArrayList<>(group.size());
        for (byte[] body : group) {
            messages.add(new Message(topics[topic], body));
        }
        if (queue < 0) {
            producer.send(messages, told(done));
        } else {
            producer.send(messages, places[topic][queue], told(done));
        }
    }

    @Override
    void openConsumer(String group) throws Exception {
        consumer = new DefaultMQPushConsumer(group);
        consumer.setNamesrvAddr(endpoint.get("namesrv").getAsString());
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        settle(consumer);
        for (int i = 0; i < topics.length; i++) {
            numbers.put(topics[i], i);
            consumer.subscribe(topics[i], "*");
        }
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            take(messages);
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        if (option("shared", false)) {
            // What a member holds when another takes the queue would be seen twice.
            consumer.suspend();
            consumer.start();
        } else {
            consumer.start();
            awaitQueues(topics.length * queues);
        }
    }

    /** RocketMQ offers nothing to wait on here, so this looks again every few milliseconds. */
    private void awaitQueues(int count) throws Exception {
        long giveUp = System.currentTimeMillis() + READY_MS;
        while (queuesOfOurs() < count) {
            if (System.currentTimeMillis() > giveUp) {
                throw new IllegalStateException("only " + queuesOfOurs() + " queues are ours");
            }
            Thread.sleep(2);
        }
    }

    private long queuesOfOurs() {
        return consumer.getDefaultMQPushConsumerImpl().getRebalanceImpl().getProcessQueueTable()
            .keySet().stream().filter(queue -> numbers.containsKey(queue.getTopic())).count();
    }

    /** In the one thread that consumes; holds what was fetched before the go. */
    private void take(List<MessageExt> messages) {
        try {
            go.await();
        } catch (InterruptedException closing) {
            return;
        }
        for (MessageExt message : messages) {
            receiver.take(message.getBody(), numbers.get(message.getTopic()),
                message.getQueueId());
        }
        if (receiver.finished()) {
            end.countDown();
        }
    }

    @Override
    void consume(Receiver receiver) throws Exception {
        this.receiver = receiver;
        consumer.setPullThresholdForQueue(65_535);
        go.countDown();
        consumer.resume();
        while (!end.await(200, TimeUnit.MILLISECONDS)) {
            if (receiver.finished()) {
                return;
            }
        }
    }

    @Override
    void close() {
        if (producer != null) {
            producer.shutdown();
        }
        if (consumer != null) {
            consumer.shutdown();
        }
    }
}
