"""One buffer from the trainer (rank 0) to every vLLM worker: over gloo (CPU, or one shared GPU) or NCCL.

Every step has a deadline. A peer that died shows as ``TransportError``, never as a hang: gloo notices a closed
connection at once and otherwise times out; NCCL has no timeout, so it is watched and abandoned.
"""

from __future__ import annotations

import concurrent.futures
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

T = TypeVar("T")
Kind = Literal["gloo", "nccl"]


class TransportError(RuntimeError):
    """The group could not be formed, or the buffer did not arrive in time."""


class Transport(Protocol):
    def broadcast(self, buffer: torch.Tensor) -> None:
        """Send ``buffer`` (rank 0) or fill it, on the device where it lies; returns when it is complete.

        Raises: TransportError.
        """
        ...

    def close(self) -> None:
        """Leave the group and free its port; never raises."""
        ...


def background(function: Callable[[], T]) -> Future[T]:
    """Run ``function`` on a daemon thread: one that hangs dies with the process instead of holding it up."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="weight-sync", daemon=True).start()
    return future


def local_address(peer_host: str, peer_port: int) -> str:
    """This machine's address on the route to the peer: in a container with several networks the right one.

    Raises: OSError: the peer's name does not resolve or no route leads to it.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(peer_host, peer_port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # UDP: picks the route, sends nothing
        return str(probe.getsockname()[0])


def advertised_host(peer_host: str, peer_port: int) -> str:
    """Address that the peer dials to reach this process: ``SYNC_HOST``, else the address on the route to it."""
    return os.environ.get("SYNC_HOST") or local_address(peer_host, peer_port)


def open_store(host: str, port: int, world_size: int, timeout_s: float) -> TCPStore:
    """Rank 0's rendezvous, listening on ``host`` only. Raises: OSError: the port is taken."""
    listener = socket.create_server((host, port))
    return TCPStore(
        host, port, world_size, True, timedelta(seconds=timeout_s), wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def join(
    kind: Kind,
    *,
    host: str,
    port: int,
    rank: int,
    world_size: int,
    device: torch.device,
    init_timeout_s: float,
    transfer_timeout_s: float,
    store: TCPStore | None = None,
) -> Transport:
    """Form the group; all ranks call it at the same time.

    Args: host, port: rank 0's store. device: this rank's model. store: rank 0 passes the one it opened.
    Raises: TransportError: not all ranks came within init_timeout_s.
    """
    try:
        store = store or TCPStore(host, port, world_size, False, timedelta(seconds=init_timeout_s))
        maker = _Gloo if kind == "gloo" else _Nccl
        return maker(store, host, port, rank, world_size, device, init_timeout_s, transfer_timeout_s)
    except (RuntimeError, OSError) as error:  # torch's DistStoreError and DistNetworkError are RuntimeErrors
        raise TransportError(f"the {kind} group at {host}:{port} was not formed: {error}") from error


class _Gloo:
    """Through the CPUs' memory; a buffer on a GPU is copied there and back."""

    def __init__(
        self, store: TCPStore, host: str, port: int, rank: int, world_size: int, _device: torch.device,
        init_timeout_s: float, transfer_timeout_s: float,
    ) -> None:  # fmt: skip
        own_address = host if rank == 0 else local_address(host, port)
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=own_address)]
        options._timeout = timedelta(seconds=init_timeout_s)
        # Connects all ranks; a fresh prefix each time keeps a restarted trainer apart from what it left behind.
        self._group: Any = ProcessGroupGloo(PrefixStore("gloo", store), rank, world_size, options)
        self._store: TCPStore | None = store
        self._rank = rank
        self._host_buffer: torch.Tensor | None = None
        self._timeout = timedelta(seconds=transfer_timeout_s)
        self._group._set_default_timeout(self._timeout)

    def broadcast(self, buffer: torch.Tensor) -> None:
        if self._group is None:
            raise TransportError("the gloo group is closed")
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._timeout
        on_host = self._on_host(buffer)
        if self._rank == 0 and on_host is not buffer:
            on_host.copy_(buffer)
        try:
            self._group.broadcast([on_host], options).wait(self._timeout)
        except RuntimeError as error:
            raise TransportError(f"the gloo broadcast broke off: {error}") from error
        if self._rank != 0 and on_host is not buffer:
            buffer.copy_(on_host)

    def _on_host(self, buffer: torch.Tensor) -> torch.Tensor:
        """``buffer`` itself, or for one on a GPU a pinned one of its size, which is kept: pinning is slow."""
        if buffer.device.type == "cpu":
            return buffer
        if self._host_buffer is None or self._host_buffer.shape != buffer.shape:
            self._host_buffer = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True)
        return self._host_buffer

    def close(self) -> None:
        self._group = self._store = self._host_buffer = None


ABORT_LIMIT_S = 10.0
"""An abort may block on a dead peer; a new group is formed all the same."""
_aborts: list[Future[Any]] = []
"""Of this process's former NCCL groups, not all done yet."""


class _Nccl:
    def __init__(
        self, store: TCPStore, _host: str, _port: int, rank: int, world_size: int, device: torch.device,
        init_timeout_s: float, transfer_timeout_s: float,
    ) -> None:  # fmt: skip
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._timeout_s = transfer_timeout_s
        concurrent.futures.wait(_aborts, ABORT_LIMIT_S)
        _aborts.clear()
        # NCCL takes its memory beside PyTorch's allocator, which may hold all that is left, unused.
        torch.cuda.empty_cache()
        group = StatelessProcessGroup(rank, world_size, store)
        forming = background(lambda: PyNcclCommunicator(group, device=self.device))
        try:
            self._communicator: Any = forming.result(init_timeout_s)
        except TimeoutError:
            raise TransportError(f"NCCL did not connect within {init_timeout_s} s") from None
        if self._communicator.disabled:
            raise TransportError("NCCL is not available in this process; use weight_sync.transport = 'gloo'")
        self._stream = torch.cuda.Stream(self.device)

    def broadcast(self, buffer: torch.Tensor) -> None:
        if self._communicator is None:
            raise TransportError("the NCCL group is closed")
        with torch.cuda.device(self.device):
            # The buffer was written on the caller's stream; ours must not read it before.
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            self._communicator.broadcast(buffer, src=0, stream=self._stream)
            done = torch.cuda.Event()
            done.record(self._stream)
        deadline = time.monotonic() + self._timeout_s
        while not done.query():
            if time.monotonic() > deadline:
                self.close()  # aborts the kernel, which would wait for its peer on the GPU for ever
                raise TransportError(f"the NCCL broadcast was not done after {self._timeout_s} s")
            time.sleep(0.0002)

    def close(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.group.store = None  # frees rank 0's port now, not when the abort is done
            _aborts.append(background(communicator.destroy))  # ncclCommAbort; may block on a dead peer
