"""All checks in the order in which a person reads them, and the part of them that a start needs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from scripts import checks
from scripts.checks import Check
from scripts.doctor import data, hub, images, machine, memory, pitfalls, policy, sandbox
from scripts.doctor.setup import Setup
from services.common.errors import MachineError, StackError

MACHINE = (
    machine.engine,
    machine.compose,
    machine.docker_socket,
    machine.readable,
    machine.processor,
    machine.memory,
    machine.shared_memory,
    machine.disk,
    machine.port,
    machine.address_pools,
    machine.gpus,
    machine.container_gpus,
    memory.policy_memory,
)
DATA = (data.recipe_file, data.task_suites, data.model, data.output_caps, data.tracker)
IMAGES = (images.present, images.made_from_these_locks, images.sandbox_base, images.digests, images.versions)
START: tuple[Callable[[Setup], Check], ...] = (
    data.task_suites,
    data.model,
    machine.readable,
    machine.processor,
    machine.memory,
    machine.disk,
    machine.port,
    machine.docker_socket,
    machine.container_gpus,
    memory.policy_memory,
    machine.engine,
    machine.compose,
    images.present,
    images.sandbox_base,
    sandbox.before_a_run,
)
"""What ``scripts.run`` and ``scripts.eval`` require; cheap ones first, the first failure ends them."""


def require(setup: Setup) -> None:
    """Raises: RecipeError, NotReadyError, MachineError: the first precondition of a start that does not hold."""
    for check in START:
        checks.require([check(setup)])


def examine(setup: Setup) -> list[Check]:
    """Every check. Those that start a container, and the Hub, are asked meanwhile."""
    with ThreadPoolExecutor(max_workers=4) as pool:
        grading = pool.submit(_done, sandbox.grading, setup)
        facts = pool.submit(pitfalls.trainer_facts, setup)
        answers = pool.submit(policy.ask, setup)
        remote = pool.submit(hub.checks, setup)
        found = [_done(check, setup) for check in (*MACHINE, *DATA, *IMAGES)]
        found += [_done(check, setup, facts.result()) for check in pitfalls.ALL]
        found.append(grading.result())
        return [*found, *policy.checks(answers.result()), *remote.result()]


def _done(check: Callable[..., Check], *arguments: Any) -> Check:
    """The check; one that meets an error of the set-up on its way has failed with it, and the others go on."""
    try:
        return check(*arguments)
    except (StackError, OSError) as error:
        kind = type(error) if isinstance(error, StackError) else MachineError
        name = check.__name__.replace("_", "-")
        return Check(name, "fail", str(error), "mend what the other lines say first", kind)
