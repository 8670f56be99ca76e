"""Answer a few prompts without a server: `python examples/offline.py`."""

from engine import LLM, SamplingParams


def main() -> None:
    llm = LLM(kv_memory="256MiB")
    greedy = SamplingParams(temperature=0.0, max_tokens=32)

    for answer in llm.generate(["The capital of France is", "Two plus three is"], greedy):
        print(f"{answer.prompt!r} -> {answer.outputs[0].text!r}")

    history = [{"role": "user", "content": "What is the capital of France?"}]
    (first,) = llm.chat(history, greedy)
    print(first.outputs[0].text)

    history += [
        {"role": "assistant", "content": first.outputs[0].text},
        {"role": "user", "content": "And of Italy?"},
    ]
    (second,) = llm.chat(history, greedy)
    usage = second.usage
    print(second.outputs[0].text)
    print(
        f"second turn: {usage.total} prompt tokens, {usage.reused} of them reused, {usage.computed} computed"
    )


if __name__ == "__main__":
    main()
