"""One module a command: options in, one room called, text and exit code out."""

from perfbench.commands.app import main
