"""Who has a producer's name: the rules, against a plain model, without a broker."""

from __future__ import annotations

import random

import pytest

from cometmq.actors.tables.producers import (
    AHEAD_MAX_MS,
    EPOCH_MAX,
    check_sender,
    deriver_of,
    epoch_for,
    is_overdone,
    note_of,
)
from cometmq.protocol.commands import OpenProducer, Position, SendMessages
from cometmq.protocol.derived import Known
from cometmq.protocol.errors import ArgumentIllegal, ProducerFenced, ProducerUnknown

SEED = 20_261_128
NAME = "writer"


def known(sender: int, epoch: int) -> Known:
    return Known(deriver_of(NAME), Position(epoch), note_of(sender), 0)


def sent(sender: int, epoch: int) -> SendMessages:
    return SendMessages([], 0, sender=sender, producer_id=NAME, epoch=epoch)


def test_the_first_has_the_time() -> None:
    assert epoch_for(OpenProducer(NAME, 1), None, 1_000) == 1_000
    assert epoch_for(OpenProducer(NAME, 1), None, -5) == 1
    assert epoch_for(OpenProducer(NAME, 1, 7), None, 1_000) == 7  # it is taken at its word


@pytest.mark.parametrize(("now_ms", "epoch"), [(1_000, 2_001), (2_000, 2_001), (3_000, 3_000)])
def test_the_next_is_above_it_whatever_the_clock_says(now_ms: int, epoch: int) -> None:
    assert epoch_for(OpenProducer(NAME, 2), known(1, 2_000), now_ms) == epoch
    assert epoch_for(OpenProducer(NAME, 1), known(1, 2_000), now_ms) == 2_000  # it comes again


@pytest.mark.parametrize("epoch", [-1, EPOCH_MAX + 1])
def test_what_is_no_epoch(epoch: int) -> None:
    with pytest.raises(ArgumentIllegal):
        epoch_for(OpenProducer(NAME, 1, epoch), None, 0)


def test_a_claim_is_bounded() -> None:
    """The clock limits a claimed epoch, not earlier claims: a higher one exists (Fault 17)."""
    now = 1_764_028_800_000
    most = now + AHEAD_MAX_MS
    for held in (None, known(1, now), known(2, now), known(2, most)):
        for sender in (1, 2):
            with pytest.raises(ArgumentIllegal, match=f"epoch = {most + 1}.*set the brokers' clo"):
                epoch_for(OpenProducer(NAME, sender, most + 1), held, now)
    assert epoch_for(OpenProducer(NAME, 1, most), None, now) == most
    assert epoch_for(OpenProducer(NAME, 1, most), known(1, now), now) == most
    assert epoch_for(OpenProducer(NAME, 2), known(1, most), now) == most + 1
    # A producer may claim its own epoch again, even if the clock was set back meanwhile.
    assert epoch_for(OpenProducer(NAME, 1, most), known(1, most), now - 5_000) == most


def test_what_an_older_release_let_a_client_claim() -> None:
    now = 1_764_028_800_000
    assert is_overdone(known(1, EPOCH_MAX), now)
    assert not is_overdone(known(1, now + AHEAD_MAX_MS + 1_000_000), now)
    assert not is_overdone(None, now)


def test_both_epochs_are_named() -> None:
    with pytest.raises(ProducerFenced, match=r"epoch 5 .*epoch 1764028800000 \(2025-11-25 "):
        check_sender(sent(1, 5), known(2, 1_764_028_800_000))
    with pytest.raises(ProducerUnknown, match=r"epoch 9 .*epoch 5"):
        check_sender(sent(1, 9), known(2, 5))
    with pytest.raises(ProducerUnknown, match="no other"):
        check_sender(sent(1, 9), None)
    for same in (4, 6):  # the broker knows another one of the same process
        with pytest.raises(ProducerUnknown):
            check_sender(sent(1, same), known(1, 5))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.slow
def test_any_order_of_opening_losing_and_sending(seed: int) -> None:
    """Processes of one name open it, the broker loses what it knows or goes back to before, its
    clock steps. At any time one may send at most, none that is fenced by what the broker knows; and
    whoever is unknown may send once it has opened again."""
    chance = random.Random(SEED + seed)
    now_ms, held = 1_000_000, None
    before: list[Known | None] = [None]
    epochs: dict[int, int] = {}
    for sender in range(1, 300):
        now_ms += chance.choice([0, 0, 1, 50, -3_000])
        step = chance.random()
        if step < 0.4:
            epoch = epoch_for(OpenProducer(NAME, sender), held, now_ms)
            assert held is None or epoch > held.position.epoch
            epochs[sender] = epoch
            held = known(sender, epoch)
            before.append(held)
        elif step < 0.5:
            held = chance.choice(before)
        may_send = []
        for each, epoch in epochs.items():
            try:
                check_sender(sent(each, epoch), held)
            except ProducerFenced:
                assert held is not None
                assert epoch <= held.position.epoch
                with pytest.raises(ProducerFenced):
                    epoch_for(OpenProducer(NAME, each, epoch), held, now_ms)
            except ProducerUnknown:
                assert held is None or epoch > held.position.epoch
                again = epoch_for(OpenProducer(NAME, each, epoch), held, now_ms)
                check_sender(sent(each, again), known(each, again))
            else:
                may_send.append(each)
        assert len(may_send) <= 1
