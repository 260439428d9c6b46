"""How long a launch should take: counted work, multiplied by what a unit of it costs. docs/model.md"""
