# train_shapes.sh - what the training record measures: shapes, batches and ways to run them. Not a program:
# gpu_record_train.sh and train_predictions.sh read it with `.`, so that what is predicted is what is measured.

# Model, then layers. 7B does not fit with its optimizer, so it is a slice of 7 layers: a stage of four.
models='qwen2.5-0.5b qwen2.5-1.5b qwen2.5-3b qwen2.5-7b:7'
service_models=qwen2.5-1.5b
chunk_size=8192
documents=256
requests=32
longest=32768
ways='chunkflow one packed'
recomputes='none full'

# Lengths of one batch. chat: as of LMSys-Chat-1M, none longer than `longest`. service: drawn with median, mean and
# longest of the requests of Mooncake's conversation trace.
draw_lengths() { # CHUNKFLOW LIST
    case $2 in
        chat) "$1" gen lmsys --n "$documents" --max "$longest" ;;
        service) "$1" gen lognormal --n "$requests" --median 7255 --sigma 1.03 --max 126527 ;;
    esac
}

# ChunkSize and K: the fastest of `chunkflow plan` among powers of two that take less than the device has and, with
# recomputation, no more than packing does.
chunks_of() { # LIST RECOMPUTE
    case $1,$2 in
        service,none) printf -- '--chunk-size %s --k 2' $((2 * chunk_size)) ;;
        service,full) printf -- '--chunk-size %s --k 8' $((2 * chunk_size)) ;;
        *) printf -- '--chunk-size %s --k 1' "$chunk_size" ;;
    esac
}

lists_of() { # MODEL
    case " $service_models " in *" $1 "*) echo chat service ;; *) echo chat ;; esac
}

options_of() { # MODEL
    case $1 in
        *:*) printf -- '--model %s --layers %s' "${1%:*}" "${1#*:}" ;;
        *) printf -- '--model %s' "$1" ;;
    esac
}

longest_in() { # FILE
    awk '{ if ($1 > most) most = $1 } END { print most }' "$1"
}

# The paper's setting: 7B on 16 GPUs, TP 4 and PP 4, so a stage has 7 layers; the last one also has the head. Passes of
# both are timed in chunks, and whole with full recomputation as there. What a chain's chunks have before them, and
# ChunkSize x K at a constant product, as in its table.
slice_model=qwen2.5-7b:7
stages=4
context=262144
slice_chunks='2048:16 4096:8 8192:4 16384:2 32768:1'
slice_lengths='40000,3000,1500,700'
whole_lengths='700,1500,3000,6000,12000,24000,48000'
