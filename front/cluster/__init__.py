"""A group of replicas that elects its master, as people set it up, look at it and change it.

`folder` is a cluster on one machine, `running` its processes; `place` is where any group is;
`looking` tells how it stands and `changes` what is new about that; `administration` is what an
operator decides.
"""
