"""Deploys another config on a running cluster, as Serve's own tools would.

Usage: upgrade.py RAY_ADDRESS CONFIG
"""

from __future__ import annotations

import sys
from pathlib import Path

import ray
import yaml
from ray.serve._private.api import serve_start
from ray.serve.schema import ServeDeploySchema

if __name__ == "__main__":
    ray.init(address=sys.argv[1], namespace="serve", log_to_driver=False)
    schema = ServeDeploySchema.model_validate(yaml.safe_load(Path(sys.argv[2]).read_text()))
    serve_start().deploy_apps(schema)
