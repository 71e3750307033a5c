"""Courses made by hand, for planted bugs that random ones meet once in thousands."""

from __future__ import annotations

from random import Random

from simulator.schedule import Schedule
from simulator.world import Node, World

from cometmq.actors.replication.core.actions import Cas
from cometmq.actors.replication.core.frames import Agreed
from cometmq.actors.replication.core.replica import Replica


class Course(Schedule):
    """Three replicas that flush first; nothing happens by itself."""

    def __init__(self, replica: type[Replica]) -> None:
        super().__init__(0, 3, replica=replica)
        self.world = World(Random(0), 3, sync=True, replica=replica)
        self.nodes = list(self.world.nodes.values())
        for node in self.nodes:
            self.world.start(node)
        assert self._calm(60)
        self.master = next(node for node in self.nodes if node.lead)
        self.near, self.far = (node for node in self.nodes if node is not self.master)
        self.held: list[Cas] = []  # changes that are still on their way to the engine
        self.late: list[tuple[str, str, Agreed]] = []  # frames that come once more, later

    def rounds(self, count: int, *, hold: bool = False) -> None:
        """
        Args:
            hold: the master's changes of the set do not arrive, and the master is told so.
        """
        world = self.world
        for _ in range(count):
            world.now += 2.0
            for node in self.nodes:
                world.tick(node)
                world.flush(node, node.end)
                while world.requests or world.net:
                    if world.requests:
                        self._request(hold)
                    else:
                        self._frame()

    def _request(self, hold: bool) -> None:
        world = self.world
        node, core, request, _ = world.requests[0]
        if hold and isinstance(request, Cas) and node is self.master:
            del world.requests[0]
            self.held.append(request)
            world.do(node, core.cas_unknown(request.ticket))
        else:
            world.serve_request(0)

    def _frame(self) -> None:
        source, to, frame, _ = self.world.net[0]
        if isinstance(frame, Agreed):
            self.late.append((source, to, frame))
        self.world.deliver(0)

    def part(self, node: Node) -> None:
        """Nothing passes to or from it, but to the engine."""
        for other in self.nodes:
            self.world.cut |= {(node.name, other.name), (other.name, node.name)}

    def leave_alone(self, node: Node) -> None:
        """All others die; it may become the master. Then they come back."""
        world = self.world
        world.cut.clear()
        for other in self.nodes:
            if other is not node:
                other.kill()
                world.sessions.pop(other.name)
        world.sessions_number += 1
        self.rounds(20)
        self._heal()


def late_joining(replica: type[Replica]) -> int:
    """The engine adds a replica long after the master was told that this is not known.

    Meanwhile a message is sent, which the joining replica does not get. Returns how many messages
    were acknowledged while it was away.
    """
    course = Course(replica)
    world, master, far = course.world, course.master, course.far
    far.kill()
    course.rounds(25)
    assert far.name not in world.record.iss
    world.start(far)
    for _ in range(20):
        if not course.held:
            course.rounds(1, hold=True)
    assert course.held, "the master has not wanted to add it"
    course.part(far)
    before = world.acks
    world.append(master, 1)
    course.rounds(8, hold=True)
    acked = world.acks - before
    late = course.held[0]
    assert late.version == world.version
    assert master.core is not None
    world.requests.append((master, master.core, late, late.version))
    world.serve_request(0, fate=0.15)
    assert far.name in world.record.iss
    course.leave_alone(far)
    return acked


def late_handshake(replica: type[Replica]) -> None:
    """The end of a handshake comes a second time, after its session has taken more bytes."""
    course = Course(replica)
    world, master, near = course.world, course.master, course.near
    near.kill()
    world.start(near)
    course.rounds(10)
    agreed = [each for each in course.late if each[1] == near.name][-1]
    before = world.acks
    world.append(master, 3)
    for _ in range(3):  # until it is acknowledged; before the next beat tells of that
        for node in course.nodes:
            world.flush(node, node.end)
        while world.net:
            world.deliver(0)
    assert world.acks == before + 3
    world.net.append((*agreed, ()))
    world.deliver(0)
    course.leave_alone(near)
