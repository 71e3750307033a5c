import com.google.gson.JsonElement;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicIntegerArray;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.atomic.AtomicReference;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.impl.factory.MQClientInstance;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.common.message.MessageRequestMode;

/**
 * What RocketMQ's own client does beside plain sends and reads. The role is `semantics`, the mode is
 * one of
 *
 * <ul>
 * <li>`transactions`: `in_flight` threads, whose local transaction commits at once;
 * <li>`handlers`: a listener that does nothing;
 * <li>`pops`: the same in a group whose queues are popped, with an acknowledgement a message;
 * <li>`retries`: a listener that fails for each message once, to have it again after a second.
 * </ul>
 *
 * <p>The job has two topics. What is asked for is done with `warmup` messages of the first, for which
 * no clock runs, as a JVM compiles what it does often; then with `messages` messages of the second.
 * But for transactions they are there already, stamped from 0 on by one producer. Clients are not
 * shut down, which takes some seconds each: they end with the process.
 */
@SuppressWarnings("deprecation") // consumeFromWhere has no successor for this consumer
final class RocketSemantics extends RocketWorker {
    private static final long TIMEOUT_S = 400;
    private static final int ANSWER_MS = 30_000;
    private static final int SEQUENCE_AT = 8;
    /** The shortest of messageDelayLevel. */
    private static final int ONE_SECOND = 1;

    public static void main(String[] args) {
        run(new RocketSemantics());
    }

    @Override
    Map<String, Object> other(String role) throws Exception {
        if (!role.equals("semantics")) {
            return super.other(role);
        }
        Map<String, Object> result = new LinkedHashMap<>();
        if (number("warmup", 0) > 0) {
            work(topics[0], number("warmup", 0), result);
        }
        double before = cpuSeconds();
        work(topics[1], number("messages", 0), result);
        result.put("cpu_s", cpuSeconds() - before);
        result.put("client", client());
        return result;
    }

    /** Of this process and of the `servers`, which are process ids. */
    private double cpuSeconds() {
        long ns = cpuNs();
        for (JsonElement server : options.getAsJsonArray("servers")) {
            ns += ProcessHandle.of(server.getAsLong()).flatMap(one -> one.info().totalCpuDuration())
                .orElseThrow().toNanos();
        }
        return ns / 1e9;
    }

    private void work(String topic, int count, Map<String, Object> result) throws Exception {
        if (mode.equals("transactions")) {
            commit(topic, count, result);
        } else {
            listen(topic, count, result);
        }
    }

    // Transactions

    private void commit(String topic, int count, Map<String, Object> result) throws Exception {
        TransactionMQProducer producer = new TransactionMQProducer("commits-of-" + topic);
        producer.setNamesrvAddr(endpoint.get("namesrv").getAsString());
        settle(producer);
        producer.setTransactionListener(new Committing());
        producer.start();
        List<MessageQueue> queues = producer.fetchPublishMessageQueues(topic);
        long before = stored(producer, queues);
        result.put("seconds", commitAll(producer, topic, count) / 1e9);
        result.put("stored_after_s", awaitStored(producer, queues, before + count) / 1e9);
        result.put("messages", stored(producer, queues) - before);
    }

    private static final class Committing implements TransactionListener {
        @Override
        public LocalTransactionState executeLocalTransaction(Message message, Object given) {
            return LocalTransactionState.COMMIT_MESSAGE;
        }

        @Override
        public LocalTransactionState checkLocalTransaction(MessageExt message) {
            return LocalTransactionState.COMMIT_MESSAGE;
        }
    }

    /** Returns the nanoseconds from the first call to the last one's return. */
    private long commitAll(TransactionMQProducer producer, String topic, int count)
            throws Exception {
        CountDownLatch finished = new CountDownLatch(inFlight);
        AtomicReference<Throwable> wrong = new AtomicReference<>();
        AtomicLong left = new AtomicLong(count);
        byte[] body = new byte[size];
        long start = System.nanoTime();
        for (int i = 0; i < inFlight; i++) {
            daemon("transaction-" + i, () -> {
                try {
                    while (left.getAndDecrement() > 0) {
                        check(producer.sendMessageInTransaction(new Message(topic, body), null));
                    }
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

    private static long stored(DefaultMQProducer producer, List<MessageQueue> queues)
            throws Exception {
        long sum = 0;
        for (MessageQueue queue : queues) {
            sum += producer.maxOffset(queue);
        }
        return sum;
    }

    /**
     * The client does not wait for the broker's answer to a commit. Returns the nanoseconds until all
     * are in their topic; there is nothing to wait on, so this looks again and again.
     */
    private static long awaitStored(DefaultMQProducer producer, List<MessageQueue> queues,
            long wanted) throws Exception {
        long start = System.nanoTime();
        long found;
        while ((found = stored(producer, queues)) < wanted) {
            if (System.nanoTime() - start > TimeUnit.SECONDS.toNanos(TIMEOUT_S)) {
                throw new IllegalStateException("only " + found + " of " + wanted + " are stored");
            }
            Thread.sleep(2);
        }
        return System.nanoTime() - start;
    }

    // Listeners

    private void listen(String topic, int count, Map<String, Object> result) throws Exception {
        String group = job.get("group").getAsString() + "-of-" + topic;
        if (mode.equals("pops")) {
            popFor(topic, group);
        }
        Deliveries deliveries = new Deliveries(count);
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group);
        consumer.setNamesrvAddr(endpoint.get("namesrv").getAsString());
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setClientRebalance(!mode.equals("pops"));
        settle(consumer);
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener(mode.equals("retries") ? deliveries.failing()
            : deliveries.taking());
        consumer.start();
        deliveries.await(result);
        consumer.suspend();
    }

    /** As `mqadmin setConsumeMode` does. The broker then says to members that they pop. */
    private void popFor(String topic, String group) throws Exception {
        DefaultMQProducer any = new DefaultMQProducer("mode-of-" + group);
        any.setNamesrvAddr(endpoint.get("namesrv").getAsString());
        any.start();
        List<MessageQueue> queues = any.fetchPublishMessageQueues(topic);
        MQClientInstance client = any.getDefaultMQProducerImpl().getMqClientFactory();
        client.updateTopicRouteInfoFromNameServer(topic);
        String broker = client.findBrokerAddressInPublish(queues.get(0).getBrokerName());
        client.getMQClientAPIImpl().setMessageRequestMode(broker, topic, group,
            MessageRequestMode.POP, 0, ANSWER_MS);
    }

    /** Which messages were delivered, and when the first and the last. In any thread. */
    private static final class Deliveries {
        private final int expect;
        private final AtomicIntegerArray seen;
        private final AtomicLong distinct = new AtomicLong();
        private final AtomicLong first = new AtomicLong();
        private volatile long last;
        private final CountDownLatch all = new CountDownLatch(1);

        Deliveries(int expect) {
            this.expect = expect;
            seen = new AtomicIntegerArray(expect);
        }

        MessageListenerConcurrently taking() {
            return (messages, context) -> {
                began();
                messages.forEach(this::done);
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            };
        }

        MessageListenerConcurrently failing() {
            return (messages, context) -> {
                began();
                for (MessageExt message : messages) {
                    if (message.getReconsumeTimes() == 0) {
                        context.setDelayLevelWhenNextConsume(ONE_SECOND);
                        return ConsumeConcurrentlyStatus.RECONSUME_LATER;
                    }
                    done(message);
                }
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            };
        }

        private void began() {
            if (first.get() == 0) {
                first.compareAndSet(0, System.nanoTime());
            }
        }

        private void done(MessageExt message) {
            long sequence = ByteBuffer.wrap(message.getBody()).order(ByteOrder.LITTLE_ENDIAN)
                .getLong(SEQUENCE_AT);
            if (seen.getAndSet((int) sequence, 1) == 0 && distinct.incrementAndGet() == expect) {
                last = System.nanoTime();
                all.countDown();
            }
        }

        void await(Map<String, Object> result) throws Exception {
            if (!all.await(TIMEOUT_S, TimeUnit.SECONDS)) {
                throw new IllegalStateException("only " + distinct + " of " + expect + " messages");
            }
            result.put("seconds", (last - first.get()) / 1e9);
            result.put("messages", distinct.get());
        }
    }
}
