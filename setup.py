"""Installs lightkv under one name.

The folders `router/` and `triton_kernels/` stand at the top level and are reached on import as
`lightkv.router` and `lightkv.triton_kernels`, through the two committed symbolic links in `lightkv/`.
Nothing is ever installed as a top-level `router` or `triton_kernels`: both names belong to others.
"""

from setuptools import setup

setup(
    packages=[
        "lightkv",
        "lightkv.attention",
        "lightkv.integrations",
        "lightkv.router",
        "lightkv.triton_kernels",
    ],
    package_data={
        "lightkv": ["py.typed"],
        "lightkv.router": ["simulation_report.html.jinja", "step_time.json"],
    },
)
