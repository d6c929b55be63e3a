"""These tests run when they are asked for, by `make test-ray`, and not with all others."""


def pytest_ignore_collect(collection_path, config):
    if not any("tests/ray" in str(argument) for argument in config.invocation_params.args):
        return True
