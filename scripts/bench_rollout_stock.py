"""Harbor's OpenCode agent on the image's binary, for bench_rollout's stock side; in the env image only."""

from harbor.agents.installed.opencode import OpenCode
from harbor.environments.base import BaseEnvironment
from typing_extensions import override


class StockOpenCode(OpenCode):
    """All of Harbor's agent but the download."""

    @override
    async def install(self, environment: BaseEnvironment) -> None:
        await self.exec_as_agent(environment, command="opencode --version")
