/* The fatbin of kernels.cu, in the library's read-only data. PARAMWIRE_CUDA_FATBIN: the file, from cmake/cuda.cmake. */
    .section .rodata
    .hidden paramwire_cuda_fatbin
    .hidden paramwire_cuda_fatbin_end
    .global paramwire_cuda_fatbin
    .global paramwire_cuda_fatbin_end
    .balign 16
paramwire_cuda_fatbin:
    .incbin PARAMWIRE_CUDA_FATBIN
paramwire_cuda_fatbin_end:
    .byte 0
    .section .note.GNU-stack, "", %progbits
