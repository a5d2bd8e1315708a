from paceline.worker.upstream.connection import ServerLoad, parse_cache_tokens, parse_load

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0",num_cpu_blocks="None",num_gpu_blocks="56"} 1.0
vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="1",num_cpu_blocks="None",num_gpu_blocks="44"} 1.0
"""
OURS = 'paceline_sequences_running{model="m"} 4.0\npaceline_sequences_waiting{model="m"} 0.0\n'


def test_the_load_is_read_from_the_metrics_of_both_servers() -> None:
    assert parse_load(VLLM) == ServerLoad(5, 1, 0.25)
    assert parse_load(OURS) == ServerLoad(4, 0, 0.0)
    assert parse_load("nothing here") == ServerLoad()


def test_the_size_of_the_cache_is_read_where_the_server_says_it() -> None:
    assert parse_cache_tokens(VLLM) == 32 * (56 + 44)
    assert parse_cache_tokens(OURS) is None
    assert parse_cache_tokens('vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0') is None


def test_labels_that_end_like_the_size_of_a_block_are_not_read() -> None:
    labels = 'block_size="32",effective_attention_block_size="128",mamba_block_size="16",num_gpu_blocks="56"'
    assert parse_cache_tokens(f"vllm:cache_config_info{{{labels}}} 1.0") == 32 * 56
