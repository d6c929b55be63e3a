"""These tests run when they are asked for, by `make test-slurm`, and not with all others."""


def pytest_ignore_collect(collection_path, config):
    if not any("tests/slurm" in str(argument) for argument in config.invocation_params.args):
        return True
