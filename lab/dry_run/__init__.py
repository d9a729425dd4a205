"""Ranks on devices that are not there: what each computes, holds, sends and waits for, and what the
formulas say that it should.
"""
