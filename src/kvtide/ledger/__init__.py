"""Who holds how much of a device, and who gets it: the file all processes on it share."""

from kvtide.ledger.account import Account
from kvtide.ledger.instance import Instance
from kvtide.ledger.ledger import Ledger
from kvtide.ledger.reading import Observer
from kvtide.ledger.records import (
    DeviceSpec,
    Granted,
    InstanceView,
    PoolFigures,
    PoolView,
    Refusal,
    Snapshot,
    State,
    Terms,
)
from kvtide.ledger.sharing import Demand
from kvtide.ledger.wake import Waker

__all__ = [
    "Account",
    "Demand",
    "DeviceSpec",
    "Granted",
    "Instance",
    "InstanceView",
    "Ledger",
    "Observer",
    "PoolFigures",
    "PoolView",
    "Refusal",
    "Snapshot",
    "State",
    "Terms",
    "Waker",
]
