"""Options and columns of Kafka's source and sink that have a different name here."""

from __future__ import annotations

from typing import Final

# The names in Spark's integration guide for Kafka, in lower case.
READ_OPTIONS: Final = {
    "kafka.bootstrap.servers": "namesrv",
    "kafka.group.id": "consumerGroup",
    "groupidprefix": "consumerGroup",
    "maxoffsetspertrigger": "maxMessagesPerTrigger",
    "minoffsetspertrigger": "minMessagesPerTrigger",
    "maxrecordsperpartition": "maxMessagesPerPartition",
    "startingoffsetsbytimestamp": "startingTimestamp",
    "endingoffsetsbytimestamp": "endingTimestamp",
    "startingoffsetsbytimestampstrategy": "onNoTimestamp",
    "failondataloss": "onMissing (fail, or skip for failOnDataLoss = false)",
    "includeheaders": "the column `properties`",
    "kafkaconsumer.polltimeoutms": "timeoutMs",
    "kafka.request.timeout.ms": "timeoutMs",
    "fetchoffset.numretries": "retries",
    "fetchoffset.retryintervalms": "",
    "kafka.isolation.level": "isolation",
    "kafka.fetch.max.bytes": "maxBytesPerPartition",
    "kafka.max.poll.records": "batchRows",
    "kafka.auto.offset.reset": "startingOffsets",
    "kafka.enable.auto.commit": "commitOffsets",
}
WRITE_OPTIONS: Final = {
    "kafka.bootstrap.servers": "namesrv",
    "includeheaders": "the column `properties`",
    "kafka.acks": "delivery",
    "kafka.enable.idempotence": "delivery",
    "kafka.transactional.id": "sinkId",
    "kafka.batch.size": "batchBytes",
    "kafka.buffer.memory": "maxInFlightBytes",
    "kafka.max.request.size": "maxMessageSize",
    "kafka.delivery.timeout.ms": "timeoutMs",
    "kafka.request.timeout.ms": "timeoutMs",
}
READ_COLUMNS: Final = {
    "key": "keys",
    "value": "body",
    "partition": "queue_id",
    "offset": "queue_offset",
    "timestamp": "store_ts",
    "timestamptype": "",
    "headers": "properties",
}
WRITE_COLUMNS: Final = {
    "key": "ordering_key, which picks the queue, or keys, to find the message by",
    "value": "body",
    "partition": "queue_id",
    "headers": "properties",
}


def counterpart(name: str, names: dict[str, str]) -> str:
    """Return the end of an error text for a name from Kafka; empty: it is not one."""
    found = names.get(name.lower())
    if found is None and not name.lower().startswith("kafka."):
        return ""
    return f"; Kafka's {name} is {found} here" if found else f"; Kafka's {name} has no counterpart"
