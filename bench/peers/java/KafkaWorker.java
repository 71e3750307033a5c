import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collection;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.kafka.clients.consumer.ConsumerRebalanceListener;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;
import org.apache.kafka.common.utils.AppInfoParser;

/** Apache Kafka's own client. Its settings are in cometmq.bench.peers.kafka. */
final class KafkaWorker extends Worker {
    private static final long READY_MS = 60_000;

    private KafkaProducer<byte[], byte[]> producer;
    private KafkaConsumer<byte[], byte[]> consumer;
    private final Map<String, Integer> numbers = new HashMap<>();
    private final List<TopicPartition> assigned = new ArrayList<>();
    private boolean going;

    public static void main(String[] args) {
        run(new KafkaWorker());
    }

    @Override
    String client() {
        return "kafka-clients " + AppInfoParser.getVersion();
    }

    private Map<String, Object> settings() {
        Map<String, Object> settings = new HashMap<>(clientSettings());
        settings.put("bootstrap.servers", endpoint.get("bootstrap").getAsString());
        return settings;
    }

    @Override
    void openProducer() throws Exception {
        producer = new KafkaProducer<>(settings(), new ByteArraySerializer(),
            new ByteArraySerializer());
        for (String topic : topics) {
            producer.partitionsFor(topic);
        }
    }

    private ProducerRecord<byte[], byte[]> record(int topic, int queue, byte[] body) {
        return new ProducerRecord<>(topics[topic], queue < 0 ? null : queue, null, body);
    }

    @Override
    void send(int topic, int queue, byte[] body, Done done) {
        producer.send(record(topic, queue, body), (metadata, why) -> {
            if (why == null) {
                done.acknowledged();
            } else {
                done.failed(why);
            }
        });
    }

    @Override
    void sendAndWait(int topic, int queue, byte[] body) throws Exception {
        try {
            producer.send(record(topic, queue, body)).get();
        } catch (ExecutionException why) {
            throw (Exception) why.getCause();
        }
    }

    /** Kafka gathers batches itself; what can be done here is not to wait for its linger. */
    @Override
    void sendBatch(int topic, int queue, List<byte[]> group, Done done) {
        AtomicInteger open = new AtomicInteger(group.size());
        AtomicInteger wrong = new AtomicInteger();
        for (byte[] body : group) {
            producer.send(record(topic, queue, body), (metadata, why) -> {
                if (why != null && wrong.getAndIncrement() == 0) {
                    why.printStackTrace();
                }
                if (open.decrementAndGet() > 0) {
                    return;
                }
                if (wrong.get() == 0) {
                    done.acknowledged();
                } else {
                    done.failed(new IllegalStateException(wrong + " of a batch failed"));
                }
            });
        }
        producer.flush();
    }

    @Override
    void openConsumer(String group) throws Exception {
        Map<String, Object> settings = settings();
        settings.put("group.id", group);
        consumer = new KafkaConsumer<>(settings, new ByteArrayDeserializer(),
            new ByteArrayDeserializer());
        for (int i = 0; i < topics.length; i++) {
            numbers.put(topics[i], i);
        }
        consumer.subscribe(Arrays.asList(topics), new Assignment());
        if (option("shared", false)) {
            // Members are balanced behind the go: who waits for it cannot answer those who come.
            consumer.partitionsFor(topics[0]);
            going = true;
            return;
        }
        long giveUp = System.currentTimeMillis() + READY_MS;
        while (assigned.size() < topics.length * queues) {
            if (System.currentTimeMillis() > giveUp) {
                throw new IllegalStateException("only " + assigned.size() + " queues assigned");
            }
            consumer.poll(Duration.ofMillis(100));
        }
        assigned.forEach(consumer::position);
    }

    /** Nothing is fetched before the go. */
    private final class Assignment implements ConsumerRebalanceListener {
        @Override
        public void onPartitionsRevoked(Collection<TopicPartition> partitions) {
            assigned.removeAll(partitions);
        }

        @Override
        public void onPartitionsAssigned(Collection<TopicPartition> partitions) {
            assigned.addAll(partitions);
            if (!going) {
                consumer.pause(partitions);
            }
        }
    }

    @Override
    void consume(Receiver receiver) {
        going = true;
        consumer.resume(consumer.paused());
        while (!receiver.finished()) {
            for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofMillis(200))) {
                receiver.take(record.value(), numbers.get(record.topic()), record.partition());
            }
        }
    }

    @Override
    void close() {
        if (producer != null) {
            producer.close();
        }
        if (consumer != null) {
            consumer.close();
        }
    }
}
