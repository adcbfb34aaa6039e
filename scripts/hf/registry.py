"""Whether an image is in a registry for somebody without a login: the Hub pulls it so."""

from __future__ import annotations

import re

import httpx

TIMEOUT_S = 20.0
DOCKER_HUB = {"docker.io": "registry-1.docker.io"}
MANIFESTS = ", ".join(
    f"application/vnd.{kind}+json"
    for kind in (
        "oci.image.manifest.v1", "oci.image.index.v1", "docker.distribution.manifest.v2",
        "docker.distribution.manifest.list.v2",
    )
)  # fmt: skip
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')


def find(reference: str) -> str | None:
    """Ask for the manifest of ``registry/name@sha256:...``, without credentials.

    Returns: None when it is there, else what came instead.
    """
    host, _, rest = reference.partition("/")
    name, _, digest = rest.partition("@")
    scheme = "http" if host.split(":")[0] in ("localhost", "127.0.0.1") else "https"
    url = f"{scheme}://{DOCKER_HUB.get(host, host)}/v2/{name}/manifests/{digest}"
    try:
        with httpx.Client(timeout=TIMEOUT_S, headers={"Accept": MANIFESTS}, follow_redirects=True) as client:
            response = client.head(url)
            if response.status_code == 401 and (token := _anonymous_token(client, response)):
                response = client.head(url, headers={"Authorization": f"Bearer {token}"})
    except httpx.HTTPError as error:
        return f"{host} does not answer ({error or type(error).__name__})"
    if response.status_code == 200:
        return None
    if response.status_code in (401, 403):
        return f"{host} asks for a login ({response.status_code})"
    return f"{host} answers {response.status_code}"


def _anonymous_token(client: httpx.Client, refusal: httpx.Response) -> str | None:
    """What a registry gives everybody who asks, as its challenge says."""
    kind, _, parameters = refusal.headers.get("WWW-Authenticate", "").partition(" ")
    values = dict(_CHALLENGE.findall(parameters))
    if kind.lower() != "bearer" or "realm" not in values:
        return None
    realm = values.pop("realm")
    answer = client.get(realm, params=values)
    if answer.status_code != 200:
        return None
    value = answer.json()
    return value.get("token") or value.get("access_token")
