"""How the scheduler reaches one rank: directly in its own process, or by the step and a socket."""

from __future__ import annotations

from typing import Protocol

from kvtide.errors import MessageError
from kvtide.ranks.endpoint import Endpoint
from kvtide.ranks.messages import Answer, Order, decode_answers
from kvtide.ranks.sockets import SchedulerSocket

__all__ = ["DirectLink", "Link", "SocketLink"]


class Link(Protocol):
    """One rank as its scheduler sees it."""

    direct: bool

    @property
    def ended(self) -> bool:
        """Whether no answer can come from this rank any more."""

    def submit(self, order: Order) -> None:
        """Hand over an order: carried out at once, or with the next step."""

    def take_orders(self) -> tuple[Order, ...]:
        """The orders that the next step must carry."""

    def receive(self) -> list[Answer]:
        """Answers that have come. Never waits."""

    def close(self) -> None:
        """Let go of the rank."""


class DirectLink:
    """A rank in the scheduler's own process: an order is carried out when it is given."""

    direct = True
    ended = False

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        endpoint.answer_directly()

    def submit(self, order: Order) -> None:
        """Carry out an order now."""
        self._endpoint.carry_out((order,))

    def take_orders(self) -> tuple[Order, ...]:
        """Nothing: all is carried out already."""
        return ()

    def receive(self) -> list[Answer]:
        """Answers, also of what could be ended since."""
        return self._endpoint.take_answers()

    def close(self) -> None:
        """Nothing to let go of."""


class SocketLink:
    """A rank in a process of its own: orders go with the step, answers come by socket."""

    direct = False

    def __init__(self, rank: int, socket: SchedulerSocket) -> None:
        self.rank = rank
        self._socket = socket
        self._orders: list[Order] = []

    @property
    def ended(self) -> bool:
        """Whether the rank has closed its end."""
        return self._socket.ended

    def submit(self, order: Order) -> None:
        """Keep an order for the next step."""
        self._orders.append(order)

    def take_orders(self) -> tuple[Order, ...]:
        """The orders since the last step."""
        orders, self._orders = tuple(self._orders), []
        return orders

    def receive(self) -> list[Answer]:
        """Answers that have come."""
        answers: list[Answer] = []
        for message in self._socket.receive():
            datagram = decode_answers(message)
            if datagram.rank != self.rank:
                raise MessageError(f"rank {datagram.rank} answers in place of rank {self.rank}")
            answers += datagram.answers
        return answers

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
