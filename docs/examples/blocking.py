from trioengine import LLM, SamplingParams

with LLM() as llm:
    question = [{"role": "user", "content": "What is the capital of Japan?"}]
    [answer] = llm.chat(question, SamplingParams(temperature=0, max_tokens=32))
    print(answer.outputs[0].text)
