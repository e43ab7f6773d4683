"""The records of a step, and the state of each storage: the record that made it, its readers, its views.

Tensors are identified by storage and geometry, never by tensor object. So a tensor that autograd saved and unpacked is
the same value as before, and a view that was made outside of recorded operators can be recomputed. Each storage has a
*root*, the result that made its contents. A write gives it a new root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..base import _compat, memory
from ..base.errors import Unsupported
from .graph_program import External, ExternalTensor, Local
from .records import Geometry, Output, Record, view_call
from .step_watch import Places, existing_storages


@dataclass
class Storage:
    """One storage, as it is now.

    Attributes
    ----------
    ref
        The storage.
    root
        The result that made its contents.
    root_geometry
        The root's geometry.
    views
        The known views of the contents, by geometry.
    depends
        Whether the contents depend on parameters, inputs or random numbers, not only on constants.
    externals
        The tensors from outside that lie in it.
    was_read
        Whether an operation has read these contents.
    was_written
        Whether the contents were written since the storage was made.
    """

    ref: _compat.StorageRef
    root: Output | External
    root_geometry: Geometry
    views: dict[Geometry, Output | External]
    depends: bool
    externals: list[int] = field(default_factory=list)
    was_read: bool = False
    was_written: bool = False

    def replace(self, root: Output, geometry: Geometry) -> None:
        """A write: the storage has new contents, which nothing has read."""
        self.root, self.root_geometry, self.views = root, geometry, {geometry: root}
        self.was_read, self.was_written = False, True


class Tape:
    """See the top of this file."""

    def __init__(self, places: Places, outside: Sequence[ExternalTensor]) -> None:
        self.records: list[Record] = []
        self.externals: list[ExternalTensor] = []
        self.in_backward = False
        self._places = places
        self._storages: dict[int, Storage] = {}
        self._storage_count = 0
        self._existing = {ref.key: ref for ref in existing_storages()}
        for each in outside:
            self._add_external(each)

    # storages and tensors

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the storage of a tensor was met already."""
        return _compat.storage_id(tensor) in self._storages

    def storage(self, tensor: torch.Tensor) -> Storage:
        """The storage of a tensor; one that is met for the first time must have been there before the step."""
        key = _compat.storage_id(tensor)
        storage = self._storages.get(key)
        if storage is not None:
            return storage
        if key not in self._existing:
            raise Unsupported(
                f"the step{self._places.here()} cannot be traced: it reads a tensor of shape {list(tensor.shape)} that "
                "was made in this step, but not by torch's operators"
            )
        return self._add_external(
            ExternalTensor(f"tensor of shape {list(tensor.shape)} from elsewhere", tensor.detach())
        )

    def add_literal(self, tensor: torch.Tensor) -> None:
        """A tensor of numbers in the program's text."""
        name = f"literal of shape {list(tensor.shape)}"
        self._add_external(ExternalTensor(name, tensor.detach(), is_literal=True)).depends = False

    def _add_external(self, outside: ExternalTensor) -> Storage:
        geometry, here = Geometry.of(outside.tensor), External(len(self.externals))
        key = _compat.storage_id(outside.tensor)
        self.externals.append(outside)
        storage = self._storages.get(key)
        if storage is None:
            storage = Storage(_compat.StorageRef(outside.tensor), here, geometry, {}, depends=True)
            self._storages[key] = storage
        storage.externals.append(here.index)
        storage.views.setdefault(geometry, here)
        return storage

    def operand(self, tensor: torch.Tensor, reads: bool = True) -> Output | External:
        """Where the contents of a tensor are; that of a view makes no reader."""
        storage = self.storage(tensor)
        storage.was_read = storage.was_read or reads
        return self._view_operand(storage, Geometry.of(tensor))

    def _view_operand(self, storage: Storage, geometry: Geometry) -> Output | External:
        known = storage.views.get(geometry)
        if known is not None:
            return known
        if geometry.is_conj or geometry.is_neg or storage.root_geometry.is_conj or storage.root_geometry.is_neg:
            raise Unsupported("the step cannot be traced: it reads a lazily conjugated or negated view of old contents")
        record = Record("view", self.in_backward, base=storage.root)
        record.calls.append(view_call(storage.root, geometry))
        operand = storage.views[geometry] = record.add_output(Local(0, 0), geometry)
        self.place(record)
        return operand

    def written(self) -> list[tuple[int, Output | External]]:
        """The tensors from outside that the step wrote into, and where their new contents are."""
        views = []
        for storage in list(self._storages.values()):
            for index in storage.externals if storage.was_written else []:
                outside = self.externals[index]
                if not outside.is_literal:  # the next step makes those anew
                    views.append((index, self._view_operand(storage, Geometry.of(outside.tensor))))
        return views

    # records

    def place(self, record: Record) -> None:
        """Adds a record behind the others; all that it reads is placed by then."""
        record.position = len(self.records)
        record.name = self._places.named(record.name, self.in_backward)
        self.records.append(record)

    def add_outputs(
        self, record: Record, call: int, tensors: Sequence[tuple[int, torch.Tensor]], depends: bool
    ) -> None:
        """Tensors in new storages become results of a record: those at these positions in the call's results."""
        for index, tensor in tensors:
            key, geometry = _compat.storage_id(tensor), Geometry.of(tensor)
            output = record.add_output(Local(call, index), geometry)
            storage = self._storages.get(key)
            if storage is None or not isinstance(storage.root, Output) or storage.root.record is not record:
                ref = _compat.StorageRef(tensor)
                storage = self._storages[key] = Storage(ref, output, geometry, {}, depends)
                number = self._next_number()
            else:
                assert isinstance(storage.root, Output)
                number = record.storages[storage.root.index][0]
            record.storages.append((number, memory.storage_bytes(tensor)))
            storage.views.setdefault(geometry, output)

    def replace_contents(self, storage: Storage, record: Record, local: Local, geometry: Geometry) -> None:
        """A result of a record becomes the new contents of a storage."""
        output = record.add_output(local, geometry)
        record.storages.append((self._next_number(), storage.ref.nbytes))
        storage.replace(output, geometry)

    def _next_number(self) -> int:
        self._storage_count += 1
        return self._storage_count
