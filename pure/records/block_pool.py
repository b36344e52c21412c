"""Who holds which KV block of one group."""

from purestep.kernels.record import record
from purestep.pure.arrays import Tape
from purestep.pure.persistent import Column, Map


@record
class BlockPool:
    """Every block but the null block is held, free or idle: cached without a holder, until it is hit or evicted.

    Both queues are taken from the front and filled from behind, so that an old pool keeps its part of the tape.
    """

    refcounts: Column  # holders of each block
    free: Tape  # blocks without holder and key, those freed first in front
    free_head: int  # where the queue begins; what lies before is gone
    idle: Tape  # idle blocks, those used last behind; stale where `idle_at` says otherwise
    idle_head: int
    idle_at: Column  # place in `idle`, -1: not idle
    num_idle: int
    block_of: Map[bytes, int]  # the prefix cache: what a block holds, by key
    key_of: Map[int, bytes]

    @property
    def num_free(self) -> int:
        """Blocks that can be had without forgetting anything."""
        return len(self.free) - self.free_head

    @property
    def num_available(self) -> int:
        """Blocks that can be had."""
        return len(self.free) - self.free_head + self.num_idle
