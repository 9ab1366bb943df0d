"""The audit of a finished run: what each observer saw, what is promised, what an attacker achieves."""

from securevfl.auditing.auditor import audit
from securevfl.auditing.report import Report
from securevfl.auditing.verdicts import Verdict

__all__ = ["Report", "Verdict", "audit"]
