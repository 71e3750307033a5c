"""Bits, pages and ends of files. Any number of them: python -m tests.fault flips"""

from __future__ import annotations

import logging
import random
from collections import Counter
from pathlib import Path

import golden
import pytest
from fault.flips import TARGETS, Judgement, Victim, flip, make_store

pytestmark = pytest.mark.slow

SEED = 20_261_121


def judge_all(victim: Victim, count: int, *, served: bool, targets: tuple[str, ...] = ()) -> None:
    logging.disable(logging.CRITICAL)  # each damage is reported by recovery, at length
    try:
        chance = random.Random(SEED)
        judged: list[Judgement] = []
        for number in range(count):
            target = targets[number % len(targets)] if targets else ""
            judged.append(flip(victim, chance, served=served, target=target))
    finally:
        logging.disable(logging.NOTSET)
    bad = [f"{one.damage}: {one.complaints}" for one in judged if one.complaints]
    assert not bad, f"{len(bad)} of {count}, seed {SEED}:\n" + "\n".join(bad[:5])
    assert any(one.changed or one.refused or one.damage for one in judged)
    changed: Counter[str] = sum((one.changed for one in judged), Counter())
    print(f"{count} damages, {sum(bool(one.refused) for one in judged)} refused, {dict(changed)}")


@pytest.mark.parametrize("clean", [True, False])
def test_damage_to_our_own_store(clean: bool, tmp_path: Path) -> None:
    settings = make_store(tmp_path / "store", clean=clean, seed=SEED)
    victim = Victim(tmp_path / "store", settings)
    judge_all(victim, 18, served=False, targets=("sealed", "tail", "queue"))


@pytest.mark.parametrize("name", ["loghub-clean", "loghub-abort"])
def test_damage_to_a_store_of_rocketmq(name: str, tmp_path: Path) -> None:
    victim = Victim(golden.unpack(name, tmp_path))
    judge_all(victim, 12, served=False, targets=("sealed", "tail", "queue"))


def test_a_broker_serves_a_damaged_store(tmp_path: Path) -> None:
    settings = make_store(tmp_path / "store", clean=True, seed=SEED)
    victim = Victim(tmp_path / "store", settings)
    judge_all(victim, 14, served=True, targets=tuple(TARGETS))


def test_a_wrong_reader_would_be_noticed(tmp_path: Path) -> None:
    """The judge itself: a flipped body that is handed out, and a message that is left out."""
    settings = make_store(tmp_path / "store", clean=True, seed=SEED)
    victim = Victim(tmp_path / "store", settings)
    copy, damage = victim.damaged_copy(random.Random(SEED), "queue")
    place = next(iter(victim.messages))
    served = dict(victim.messages)
    del served[place]
    verdict = Judgement(damage)
    victim._compare(verdict, served)
    assert verdict.missing == 1
    other = next(p for p, m in victim.messages.items() if m.body != victim.messages[place].body)
    verdict = Judgement(damage)
    victim._compare(verdict, victim.messages | {place: victim.messages[other]})
    assert "is served" in verdict.complaints[0]
    assert copy.exists()
