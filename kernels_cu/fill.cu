// fill: words of memory with one value, as a memset node of a CUDA graph does it.
//
// Why a kernel: between two kernels of a graph, a memset of 4 bytes takes up to 2 us longer than
// this kernel (H100; 1.5 to 2 us in steps of Llama, nothing in one of GPT-2). cuDNN and
// cuBLAS zero so few bytes before many of their kernels: a captured training step has hundreds of
// these memsets.
//
// Floor: 4 bytes written per word. With so few of them, the launch is all that counts.
//
// Shapes: any number of words.

extern "C" __global__ void fill(
    unsigned int* words,      // (n)
    unsigned int value,
    long long n)
{
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) words[i] = value;
}
