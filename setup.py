"""What pyproject.toml has no words for: tools/ and examples/ are installed inside the package, from where they are."""

from setuptools import find_namespace_packages, setup

setup(
    packages=[*find_namespace_packages(include=["megatron_ext*"]), "megatron_ext.tools", "megatron_ext.examples"],
    package_dir={"megatron_ext.tools": "tools", "megatron_ext.examples": "examples"},
    py_modules=["pretrain_skyladder"],
)
