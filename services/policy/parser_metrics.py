"""What the tool-call parser made of the policy's calls, on vLLM's own ``/metrics``.

Its own module, because vLLM runs a plugin file once for each flag that names it and a counter may exist once. The
name has no ``vllm:`` prefix: vLLM unregisters those when its engine starts, after the plugin was loaded.
"""

from prometheus_client import Counter

from services.policy.lfm2_stream import Output

TOOL_CALLS = Counter(
    "lfm2_tool_calls",
    "Tool calls: parsed as written, repaired (unescaped inner quotes), or blocks not read and not run.",
    ["outcome"],
)
for _outcome in ("parsed", "repaired", "unparsed"):
    TOOL_CALLS.labels(_outcome)  # present at 0 from the start


def count(output: Output) -> None:
    repaired = sum(call.repaired for call in output.calls)
    TOOL_CALLS.labels("parsed").inc(len(output.calls) - repaired)
    TOOL_CALLS.labels("repaired").inc(repaired)
    TOOL_CALLS.labels("unparsed").inc(len(output.unread))
