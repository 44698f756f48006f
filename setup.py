"""Installs lightkv under one name.

The folders `router/` and `triton_kernels/` stand at the top level and are reached on import as
`lightkv.router` and `lightkv.triton_kernels`, through the two committed symbolic links in `lightkv/`.
Nothing is ever installed as a top-level `router` or `triton_kernels`: both names belong to others.
"""

from setuptools import find_packages, setup

setup(
    packages=find_packages(include=["lightkv", "lightkv.*"]),  # follows the links
    package_data={
        "lightkv": ["py.typed"],
        "lightkv.router.engine": ["step_time.json"],
        "lightkv.router.simulate.report": ["page.html.jinja"],
    },
)
