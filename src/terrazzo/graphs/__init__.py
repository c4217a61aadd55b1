"""Programs with DTensors as graphs of local operations and collectives, for a compiler."""

from terrazzo.graphs.api import CompileReport, GraphReport, compile, compile_report
from terrazzo.graphs.program import CompileWarning

__all__ = ["CompileReport", "CompileWarning", "GraphReport", "compile", "compile_report"]
