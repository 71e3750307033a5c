"""One schedule: a random course of faults drawn from a seed, then everything heals.

After the healing a master has to serve, all replicas have to catch up, and Truth.final is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple

from simulator.truth import Violation
from simulator.world import Node, World

from cometmq.actors.replication.core.actions import Service
from cometmq.actors.replication.core.replica import Replica

STEPS = 200
ROUNDS_MAX = 120
WIRE = 0.02  # the part of schedules that go through the codecs


class Outcome(NamedTuple):
    acks: int
    epochs: int
    is_available: bool  # False: nobody was left who has all that was confirmed
    violation: str = ""


class Schedule:
    """
    Args:
        sync: whether replicas flush before they acknowledge.
        steps: of faults, before the healing.
    """

    def __init__(
        self, seed: int, count: int, *, replica: type[Replica] = Replica, steps: int = STEPS
    ) -> None:
        rng = self.rng = Random(f"{count}:{seed}")
        sync = rng.random() < 0.75
        self.world = World(rng, count, sync=sync, replica=replica, wire=rng.random() < WIRE)
        self.steps = steps
        self.nodes = list(self.world.nodes.values())
        # How rough it gets: each schedule has its own mixture.
        self.rough = rng.choice((0.015, 0.04, 0.1))
        self.loss = rng.choice((0.0, 0.02, 0.1))
        self.disorder = rng.choice((0.0, 0.05, 0.4))
        self.engine_faults = rng.choice((0.0, 0.2, 0.7))
        self.world.crash = rng.choice((0.0, 0.003, 0.015))
        menu: list[tuple[float, Callable[[Node], None]]] = [
            (3, self._kill),
            (3, self._power),
            (1, self._power_all),
            (4, self._suspect),
            (3, self._part),
            (4, self._rejoin),
            (4, self._part_from_engine),
            (1, self._end_in_order),
            (rng.choice((0, 0, 0.7)), self._damage),
            (rng.choice((0, 0, 1)), self._replace),
            (rng.choice((0, 0, 1)), self._clean),
        ]
        self._ops = [op for _, op in menu]
        self._weights = [weight * rng.choice((0, 1, 1, 2)) + 0.001 * weight for weight, _ in menu]

    def run(self) -> Outcome:
        world = self.world
        try:
            for node in self.nodes:
                world.start(node)
            if self.rng.random() < 0.8:
                self._calm(30, until_open=True)
            for _ in range(self.steps):
                self.step()
            available = self._heal()
        except Violation as violation:
            return Outcome(world.acks, world.record.epoch, True, str(violation))
        return Outcome(world.acks, world.record.epoch, available)

    # --- faults and work, in any order ---

    def step(self) -> None:
        world, rng = self.world, self.rng
        world.now += 0.8
        draw = rng.random()
        node = self.nodes[int(rng.random() * len(self.nodes))]
        if draw < self.rough:
            rng.choices(self._ops, self._weights)[0](node)
        elif draw < 0.34:
            if node.core is None or not node.connected:
                self._suspect(node)
            if node.core is not None:
                world.tick(node)
            elif not node.halted:
                world.start(node)
        elif draw < 0.48:
            leaders = [each for each in self.nodes if each.lead]
            if leaders:
                world.append(leaders[int(rng.random() * len(leaders))], 1 + int(rng.random() * 3))
        elif draw < 0.60:
            if node.core is not None and node.disk < node.end:
                whole = rng.random() < 0.7
                world.flush(node, node.end if whole else rng.randint(node.disk, node.end))
        elif draw < 0.72 and world.requests:
            for _ in range(min(4, len(world.requests))):
                self._engine()
        else:
            for _ in range(min(2, len(world.net))):
                self._network()

    def _network(self) -> None:
        world, rng = self.world, self.rng
        if not world.net:
            return
        index = 0
        if rng.random() < self.disorder:
            index = int(rng.random() * len(world.net))
        draw = rng.random()
        if draw < self.loss:
            del world.net[index]
        elif draw < 2 * self.loss:
            again = world.net[index]
            world.deliver(index, corrupt=rng.random() < 0.1)
            world.net.append(again)
        else:
            world.deliver(index)

    def _engine(self) -> None:
        world, rng = self.world, self.rng
        index = int(rng.random() * len(world.requests))
        if rng.random() >= self.engine_faults:
            world.serve_request(index)
        else:
            stale = int(rng.random() * 3)
            world.serve_request(index, fate=rng.random() * 0.6, stale=stale)

    def _kill(self, node: Node) -> None:
        node.kill()

    def _power(self, node: Node) -> None:
        node.power_off(self.rng)

    def _power_all(self, node: Node) -> None:
        for each in self.nodes:
            each.power_off(self.rng)

    def _end_in_order(self, node: Node) -> None:
        """No mastership is given up first: that costs nothing but time."""
        if node.core is None or node.is_stopping:
            return
        self.world.flush(node, node.end)
        if node.core is not None:
            self.world.do(node, node.core.ending())
            node.kill()

    def _suspect(self, node: Node) -> None:
        """The engine ends a session; also one of a process that lives."""
        if self.world.sessions.pop(node.name, None):
            self.world.sessions_number += 1

    def _part(self, node: Node) -> None:
        """Nothing passes from one to another, or to all others; in one or both directions."""
        world, rng = self.world, self.rng
        others = [each for each in self.nodes if each is not node]
        if rng.random() < 0.5:
            others = [rng.choice(others)]
        ways = rng.choice((1, 2, 3))
        for other in others:
            if ways & 1:
                world.cut.add((node.name, other.name))
            if ways & 2:
                world.cut.add((other.name, node.name))

    def _rejoin(self, node: Node) -> None:
        self.world.cut.clear()
        for each in self.nodes:
            each.connected = True

    def _part_from_engine(self, node: Node) -> None:
        node.connected = False

    def _damage(self, node: Node) -> None:
        """A bit flips in what is confirmed, and known to be so even after a cut of power."""
        top = min(node.promises.confirm_offset, node.end)
        if top > node.begin:
            node.damaged.add(self.rng.randrange(node.begin, top))

    def _replace(self, node: Node) -> None:
        """The machine comes back with an empty disk."""
        node.new_store()

    def _clean(self, node: Node) -> None:
        """What is old is deleted; the last confirmed record stays."""
        if node.core is not None and node.shown - 1 > node.begin:
            begin = self.rng.randint(node.begin, node.shown - 1)
            self.world.cleans = True
            del node.log[: begin - node.begin]
            node.begin = begin
            node.damaged = {each for each in node.damaged if each >= begin}
            node.disk = max(node.disk, begin)
            self.world.do(node, node.core.cleaned(begin))

    # --- healing ---

    def _heal(self) -> bool:
        """Whether somebody serves again. Nobody may, where all who had everything are gone."""
        world = self.world
        world.crash = 0.0
        world.cut.clear()
        for node in self.nodes:
            node.connected = True
        for name in [each for each in world.sessions if world.nodes[each].core is None]:
            del world.sessions[name]
            world.sessions_number += 1
        if not self._well_again():
            hopeful = [
                name
                for name in (*world.record.iss, *world.record.elr)
                if not world.nodes[name].halted
            ]
            if hopeful:
                raise Violation(f"dead: {self._state()}")
            return False
        master = next(node for node in self.nodes if node.lead)
        world.truth.final(master.begin, master.log, world.counts)
        return True

    def _well_again(self) -> bool:
        """Replicas that have stopped are replaced, also those that find their damage only now."""
        for _ in range(2):
            for node in self.nodes:
                if node.halted:
                    node.new_store()
            if self._calm(ROUNDS_MAX):
                return True
        return False

    def _calm(self, rounds: int, *, until_open: bool = False) -> bool:
        """All works, in turns, until all is well; False if it is not by then.

        Args:
            until_open: until a master takes messages, no more.
        """
        world = self.world
        sent = 0
        for _ in range(rounds):
            world.now += 2.0
            for node in self.nodes:
                if node.core is None and not node.halted:
                    self._start_afresh(node)
                world.tick(node)
                if node.disk < node.end:
                    world.flush(node, node.end)
                self._drain()
            master = next((each for each in self.nodes if each.service is Service.OPEN), None)
            if master is None:
                continue
            if until_open:
                return True
            if sent < 2 and not master.pending:
                sent += 1
                world.append(master, 2)
                self._drain()
            elif self._is_well(master):
                return True
        return False

    def _start_afresh(self, node: Node) -> None:
        world = self.world
        if world.sessions.pop(node.name, None):
            world.sessions_number += 1
        world.start(node)

    def _drain(self) -> None:
        world = self.world
        for _ in range(400):
            if world.requests:
                world.serve_request(0)
            elif world.net:
                world.deliver(0)
            else:
                return
        raise Violation(f"storm: frames make frames without an end: {world.net[:3]}")

    def _is_well(self, master: Node) -> bool:
        """Everybody has all of the master's log, everything is confirmed, the set is complete."""
        end = master.end
        if master.core is None or master.core.local.confirm != end or master.pending:
            return False
        up = [node for node in self.nodes if not node.halted]
        record = self.world.record
        if len(record.iss) < len(up):
            return False
        for node in up:
            begin = max(node.begin, master.begin)
            if node.core is None or node.end != end or node.disk != end:
                return False
            if (
                not node.damaged
                and node.log[begin - node.begin :] != master.log[begin - master.begin :]
            ):
                raise Violation(f"unequal: {node.name} and the master {master.name}")
        return True

    def _state(self) -> str:
        """For a report of a group that does not come back."""
        nodes = "; ".join(
            f"{each.name} {each.begin}-{each.disk}-{each.end} confirm "
            f"{each.core.local.confirm if each.core else '-'} leads {each.lead} {each.service} "
            f"{each.halted}"
            for each in self.nodes
        )
        record = self.world.record
        return f"epoch {record.epoch} {record.master} iss {record.iss} elr {record.elr}: {nodes}"


def run(seed: int, count: int, replica: type[Replica] = Replica, steps: int = STEPS) -> Outcome:
    """A schedule from its seed. Any exception of the core is a violation as well."""
    try:
        return Schedule(seed, count, replica=replica, steps=steps).run()
    except Exception as error:
        return Outcome(0, 0, True, f"exception: {error!r}")
