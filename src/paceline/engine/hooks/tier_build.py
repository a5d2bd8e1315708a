"""Builds the cache tiers of an engine from its configuration."""

import logging
from pathlib import Path

from paceline.core.clock import Clock
from paceline.core.config import EngineConfig
from paceline.core.errors import InvalidConfig, OutOfMemory
from paceline.core.machine import GIB, total_memory
from paceline.engine.hooks.tiers import Tiers
from paceline.kv.block_tables import BlockTables, blocks_for
from paceline.kv.tiers.disk_folder import DiskFolder
from paceline.kv.tiers.store import TierStore
from paceline.models.host_blocks import HostBlocks
from paceline.models.kv_blocks import block_bytes, cache_fingerprint
from paceline.models.loading.checksums import weights_checksum
from paceline.models.runner import ModelRunner

logger = logging.getLogger(__name__)

DISK_HOST_BYTES = GIB
"""Size of the host tier if only a disk is configured: blocks pass through it. Larger if one sequence of full length needs more,
up to a quarter of the machine's memory."""
MIN_SLOTS = 16


def make_tiers(
    config: EngineConfig, runner: ModelRunner, tables: BlockTables, clock: Clock, window: int
) -> Tiers | None:
    """The tiers. None if the device is the only tier. `window` is the number of tokens of the longest sequence."""
    each, host_bytes = block_bytes(runner), config.kv_host_bytes
    if host_bytes is None and config.kv_disk is not None:
        host_bytes = min(max(DISK_HOST_BYTES, blocks_for(window) * each), total_memory() // 4)
    if not host_bytes:
        return None
    num_slots = host_bytes // each
    if num_slots < MIN_SLOTS:
        raise InvalidConfig(
            f"kv_host_bytes ({host_bytes}) is too small for this model: set at least {MIN_SLOTS * each}, or 0 for none"
        )
    folder = None if config.kv_disk is None else _open_folder(config, runner, each)
    try:
        memory = HostBlocks(runner, num_slots)
    except RuntimeError as error:  # torch raises it if the memory cannot be allocated
        if folder is not None:
            folder.close()
        raise OutOfMemory(f"kv_host_bytes ({host_bytes}) cannot be allocated: {error}; set it lower") from None
    tiers = Tiers(tables, memory, TierStore(memory, clock, folder, config.kv_disk_bytes), clock)
    report = tiers.report()
    logger.info(
        "the cache has %d blocks in host memory%s",
        num_slots,
        "" if folder is None else f", and {report.disk_blocks} saved blocks on disk in {folder.folder}",
    )
    return tiers


def _open_folder(config: EngineConfig, runner: ModelRunner, each: int) -> DiskFolder:
    assert config.kv_disk is not None
    fingerprint = cache_fingerprint(
        runner, weights_checksum(config.model), f"{config.quantization} {config.activations}"
    )
    folder = DiskFolder(Path(config.kv_disk).expanduser(), fingerprint, each)
    if config.kv_disk_bytes < MIN_SLOTS * folder.file_bytes:
        folder.close()
        raise InvalidConfig(
            f"kv_disk_bytes ({config.kv_disk_bytes}) is too small for this model: set at least "
            f"{MIN_SLOTS * folder.file_bytes}"
        )
    return folder
