#!/usr/bin/env bash
# Build check of the job image: every program of supervisord.conf can be imported by the Python that it names.
set -euo pipefail
cd /app
while read -r python module; do
    echo "job: $python imports $module"
    "$python" /run/check_imports.py "services.$module"
done <<'PROGRAMS'
/app/venvs/trainer/bin/python trainer
/app/venvs/trainer/bin/python policy
/app/venvs/trainer/bin/python weight_sync
/app/venvs/env/bin/python env
/app/venvs/tools/bin/python watchdog
/app/venvs/tools/bin/python evaluator
/app/venvs/tools/bin/python hub
/app/venvs/job/bin/python job
PROGRAMS
/app/venvs/job/bin/python -m supervisor.supervisord --version
tini --version
