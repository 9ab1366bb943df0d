"""The audit of a finished run: what each observer saw, what is promised, what an attacker achieves."""

from securevfl.auditing.auditor import audit
from securevfl.auditing.report import HOLDS, NO_GUARANTEE, VIOLATED, Report

__all__ = ["HOLDS", "NO_GUARANTEE", "VIOLATED", "Report", "audit"]
