"""python -m moe_fast.bench"""

from moe_fast.bench.commands import app

if __name__ == "__main__":
    app()
