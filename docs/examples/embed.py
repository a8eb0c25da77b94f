import trio

import trioengine


async def main() -> None:
    async with trioengine.open_engine() as engine:
        sampling = trioengine.SamplingParams(max_tokens=500, output_kind=trioengine.RequestOutputKind.DELTA)
        with trio.move_on_after(2):  # Leaving the block by any way, also by this deadline, is all it takes to abort.
            async with engine.generate(trioengine.GenerateRequest("Once upon a time", sampling)) as outputs:
                async for output in outputs:
                    print(output.outputs[0].text, end="", flush=True)
        print("\n...and the program goes on.")


trio.run(main)
