"""Harbor's OpenCode agent on a baked binary, and OpenEnv's seam that selects it."""

from __future__ import annotations

import dataclasses
import functools
import shlex
from typing import Any, ClassVar

from harbor.agents.installed.opencode import OpenCode
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from openenv.harbor import seams
from typing_extensions import override

from services.common.errors import NotReadyError
from services.common.recipe import Recipe
from services.env import agent_phase, opencode
from services.env.docker import DockerError, docker
from services.env.hub_sandbox import HubSandbox
from services.env.sandbox import Sandbox

HARNESS = "opencode"
USER = "agent"
UID = 10002
HOME = f"/home/{USER}"


class AgentSetupError(RuntimeError):
    """The sandbox has no usable OpenCode; the message says what was found and what is needed."""


class BakedOpenCode(OpenCode):
    """OpenCode that the image carries, run by a user who may not touch the verifier's files or programs.

    Harbor's own class installs node and the newest OpenCode over the network in every sandbox.
    """

    checked_images: ClassVar[set[str]] = set()
    """Ids of images whose binary has the right version: asking it takes 0.7 s of CPU, and an id never changes."""

    @override
    async def setup(self, environment: BaseEnvironment) -> None:
        await self.install(environment)

    @override
    async def install(self, environment: BaseEnvironment) -> None:
        """Check the baked version, once an image, and make the agent's user; one command, as root.

        Raises: AgentSetupError: no binary, another version, or no right to make the user.
        """
        image = environment.image_id if isinstance(environment, Sandbox) else None
        known = image in self.checked_images
        script = _user_script(environment.task_env_config.workdir)
        result = await environment.exec(script if known else _VERSION_SCRIPT + script, user="root")
        output = (result.stdout or "").strip()
        if result.return_code != 0 or not (known or output == self._version):
            raise AgentSetupError(
                f"the sandbox's OpenCode is {output[-300:] or 'missing'!r}, env.opencode_version is {self._version!r}; "
                "build it with that version (`make images`), or set env.sandbox_image to an image that carries it"
            )
        if image:
            self.checked_images.add(image)

    @override
    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        try:
            with environment.with_default_user(USER):
                await super().run(instruction, environment, context)
        finally:
            # Also after a time-out: Harbor stops waiting then, but nothing stops the agent's processes.
            if isinstance(environment, Sandbox | HubSandbox):
                await environment.end_agent_phase()
            else:
                await agent_phase.end(environment, UID)


_VERSION_SCRIPT = "HOME=/tmp/opencode-version opencode --version && rm -rf /tmp/opencode-version && "


def _user_script(workdir: str | None) -> str:
    home, work = shlex.quote(HOME), shlex.quote(workdir or ".")
    return (
        f"{{ id -u {USER} > /dev/null 2>&1 || echo '{USER}:x:{UID}:{UID}::{HOME}:/bin/bash' >> /etc/passwd; }} && "
        f"mkdir -p {home} && chown -R {UID}:{UID} {home} {work}"
    )


def check_image(cfg: Recipe, image: str, image_id: str) -> None:
    """Ask the sandbox image's OpenCode for its version before any rollout does.

    Raises: NotReadyError: there is none, or another version than the recipe's.
    """
    command = ("run", "--rm", "--network", "none", image_id, "opencode", "--version")
    try:
        found = docker(*command).strip()
    except DockerError as error:
        raise NotReadyError(f"image {image} has no OpenCode that starts: {error}") from None
    if found != cfg.env.opencode_version:
        raise NotReadyError(
            f"image {image} carries OpenCode {found!r}, env.opencode_version is "
            f"{cfg.env.opencode_version!r}; build the image with that version, or change the recipe"
        )
    BakedOpenCode.checked_images.add(image_id)


def register(cfg: Recipe) -> None:
    """Make ``opencode`` of OpenEnv's seam table ours, with the recipe's numbers; before the first rollout."""
    seams.SEAMS[HARNESS] = dataclasses.replace(
        seams.SEAMS[HARNESS],
        import_path=f"{__name__}:{BakedOpenCode.__name__}",
        model_fmt=opencode.PROVIDER + "/{model}",
        agent_env={**opencode.ENVIRONMENT, "HOME": HOME},
        kwargs=functools.partial(_kwargs, cfg),
        # OpenEnv would switch tools off in training only; ours are off in evaluation too.
        training_kwargs={},
    )


def _kwargs(cfg: Recipe, base_url: str, session: str, model: str) -> dict[str, Any]:
    return {
        "version": cfg.env.opencode_version,
        "opencode_config": opencode.config(cfg, base_url, session, model),
    }
