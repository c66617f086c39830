"""From the breakdown of a cycle to a decision: pure functions over counters, without any input or output.

`observations` turns samples into what happened per batch size and step count, `baseline` holds what a decode
step costs without speculation, `acceptance` and `cost` say what other step counts would yield and cost,
`whatif` compares them, `report` puts it into sentences and numbers, and `promql` holds the same figures as
queries.
"""
