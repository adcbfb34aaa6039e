"""How OpenCode is set up in a sandbox: its configuration file and environment, from the recipe.

OpenCode itself is unmodified. Training and evaluation get the very same configuration, because the tools it offers
are part of every prompt. Key and variable names are those of OpenCode 1.18.33.
"""

from __future__ import annotations

from typing import Any

from services.common.recipe import Recipe

PROVIDER = "intercepted"
"""OpenEnv's name for the capture proxy; OpenCode speaks another protocol to a provider called ``openai``."""

DENIED_TOOLS = ("task", "question", "skill", "webfetch", "websearch")
"""No delegation (its turns could not be told from the agent's), no question to nobody, no network; the one built-in
skill is about OpenCode's own configuration."""

ENVIRONMENT = {
    # Nothing in a sandbox can be reached but the capture proxy: a look-up that waits for its timeout costs seconds.
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    "OPENCODE_DISABLE_SHARE": "1",
    "OPENCODE_PURE": "1",
    # What a task's data or the agent leaves in the working directory does not configure the next start.
    "OPENCODE_DISABLE_PROJECT_CONFIG": "1",
    "OPENCODE_DISABLE_EXTERNAL_SKILLS": "1",
    "OPENCODE_DISABLE_CLAUDE_CODE": "1",
    "OPENCODE_EXPERIMENTAL_DISABLE_FILEWATCHER": "1",
}


def config(cfg: Recipe, base_url: str, session: str, model: str) -> dict[str, Any]:
    """``opencode.json`` of one rollout.

    Args:
        base_url: of the capture proxy as a sandbox reaches it. session: its key, which names the rollout.
        model: name of the served model.
    """
    return {
        "$schema": "https://opencode.ai/config.json",
        "enabled_providers": [PROVIDER],
        "provider": {
            PROVIDER: {
                "npm": "@ai-sdk/openai-compatible",
                "name": "capture proxy",
                "options": {
                    "baseURL": f"{base_url}/v1",
                    "apiKey": session,
                    # The Jobs proxy strips Authorization; the capture proxy takes either.
                    "headers": {"x-api-key": session},
                    # One model call may take as long as the agent may.
                    "timeout": round(cfg.rollout.agent_timeout_s * 1000),
                },
                "models": {
                    model: {
                        "name": model,
                        "limit": {
                            "context": cfg.model.max_model_len,
                            "output": cfg.sampling.max_completion_tokens,
                        },
                    }
                },
            }
        },
        # "ask" blocks for ever without a terminal; a denied tool is not offered to the model at all.
        "permission": {"*": "allow", **dict.fromkeys(DENIED_TOOLS, "deny")},
        # A title is an extra model call without tools that can only cost budget, or be mistaken for the agent's.
        "agent": {"title": {"disable": True}},
        # A rewritten history forks the rollout. One that outgrows the context is ended by the proxy, and graded.
        "compaction": {"auto": False, "prune": False},
        "autoupdate": False,
        "share": "disabled",
        "snapshot": False,
        "formatter": False,
        "lsp": False,
    }
