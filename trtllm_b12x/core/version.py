# SPDX-License-Identifier: Apache-2.0
"""Define the package version. The build reads this file."""

__version__ = "0.1.0"
