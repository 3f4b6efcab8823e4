# SPDX-License-Identifier: Apache-2.0
# Runs run.sh with imaginary programs: one experiment is fine, others hang, crash, or aren't for this device. All of it
# must be told apart in the JSON file, and no step may cost another.
#
#   cmake -DRUN=run.sh -DDIRECTORY=... -P run_imaginary.cmake
file(REMOVE_RECURSE ${DIRECTORY})
set(device "# Imaginary \"GPU\"\\1, 7 SMs")
set(figures "{\"figures\": {\"gpu.x\": {\"median\": 7}}}")
file(CONFIGURE OUTPUT ${DIRECTORY}/test_gpu CONTENT "#!/bin/sh\necho '  not supported: one device'\n")
file(CONFIGURE OUTPUT ${DIRECTORY}/gpu_figures CONTENT [=[#!/bin/sh
case $1 in
    --device) printf '%s\n' '@device@' ;;
    --list) printf '%s\n' 'good 20' 'hanging 1' 'crashing 20' 'absent 20' 'last 20' ;;
    good) echo 'figure gpu.x_299 1 us'; seq -f 'figure gpu.y%g 2 us' 300; echo '# seen'; echo '@figures@' >"$2" ;;
    last) echo '@figures@' >"$2" ;;
    hanging) sleep 60 ;;
    crashing) echo 'half a li'; kill -SEGV $$ ;;
    absent) exit 4 ;;
esac
]=] @ONLY)
file(CONFIGURE OUTPUT ${DIRECTORY}/bin/compute-sanitizer CONTENT [=[#!/bin/sh
[ $2 != racecheck ] || exit 9
[ $2 != initcheck ] || { echo '========= Error: Device not supported.'; exit 1; }
case "$*" in *'/test_gpu ~[memory]~[waits]') ;; *) exit 8 ;; esac
]=])
file(CONFIGURE OUTPUT ${DIRECTORY}/bin/python3 CONTENT [=[#!/bin/sh
case "$*" in
    */tenants.py\ */pytorch_tenants.so\ */figures/pytorch) exit 4 ;;
    */training.py\ */python_tenants.so\ */figures/training) exit 4 ;;
    */server.py\ */gpu_server\ */figures/server\ --seconds\ [1-9]*)
        [ -d "$TMPDIR/figures" ] || exit 7
        echo 'figure gpu.server_batch_pct 80 %'; echo '@figures@' >"$3" ;;
    */engines.py\ */engine_figures\ */figures/engines_more\ --seconds\ [1-9]*\ --more)
        echo 'figure gpu.engines_p99_vs_alone_inference_load_5 1.1 x'; echo '@figures@' >"$3" ;;
    */engines.py\ */engine_figures\ */figures/engines\ --seconds\ [1-9]*) echo 'figure gpu.engines_gate_cost_pct 1 %'; echo '@figures@' >"$3" ;;
    */engines.py\ */torch_figures\ decoder\ */figures/decoder) echo 'figure gpu.decoder_token_mismatches 0 tokens'; echo '@figures@' >"$4" ;;
    */engines.py\ */torch_figures\ slices\ */figures/slices) exit 4 ;;
    */engines.py\ */training_figures\ */figures/ranks) echo 'figure gpu.torch_training_parameters_differ 0 parameters'; echo '@figures@' >"$3" ;;
    *) exit 8 ;;
esac
]=] @ONLY)
file(WRITE ${DIRECTORY}/engine_figures "")
file(WRITE ${DIRECTORY}/training_figures "")
file(WRITE ${DIRECTORY}/torch_figures "")
file(WRITE ${DIRECTORY}/gpu_server "")
file(WRITE ${DIRECTORY}/python_tenants.so "")
foreach(program IN ITEMS test_gpu gpu_figures engine_figures torch_figures training_figures gpu_server bin/compute-sanitizer bin/python3)
    file(CHMOD ${DIRECTORY}/${program} PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
endforeach()

# The folder that OUT names gets the same files, and so does that of --keep, named after the device.
set(ENV{PATH} ${DIRECTORY}/bin:$ENV{PATH})
set(ENV{OUT} ${DIRECTORY}/out)
file(MAKE_DIRECTORY ${DIRECTORY}/kept)
execute_process(COMMAND ${RUN} --programs ${DIRECTORY} --keep ${DIRECTORY}/kept ${DIRECTORY}/results RESULT_VARIABLE code OUTPUT_VARIABLE page)
if(NOT code EQUAL 1)
    message(FATAL_ERROR "exit code ${code} instead of 1:\n${page}")
endif()
file(READ ${DIRECTORY}/out/gpu.json json)
file(READ ${DIRECTORY}/results/gpu.txt text)
file(READ ${DIRECTORY}/kept/imaginary-gpu-1/gpu.txt kept_text)
file(READ ${DIRECTORY}/kept/imaginary-gpu-1/gpu.json kept_json)
if(NOT kept_text STREQUAL text OR NOT kept_json STREQUAL json)
    message(FATAL_ERROR "what was kept isn't what was found")
endif()
file(READ ${DIRECTORY}/out/gpu.log log)
if(NOT log STREQUAL page)
    message(FATAL_ERROR "gpu.log isn't what was printed:\n${page}")
endif()
# One page, however much is measured and printed.
string(REGEX MATCHALL "\n" lines "${text}")
list(LENGTH lines lines)
if(lines GREATER 60 OR NOT text MATCHES "Imaginary" OR NOT text MATCHES "x_299  *1 us" OR NOT text MATCHES "engines_gate_cost_pct  *1 %"
   OR NOT text MATCHES "server_batch_pct  *80 %" OR NOT text MATCHES "hanging  *out of time")
    message(FATAL_ERROR "gpu.txt has ${lines} lines, or isn't the page:\n${text}")
endif()

function(expect expected)
    string(JSON found GET "${json}" ${ARGN})
    if(NOT found STREQUAL expected)
        message(FATAL_ERROR "'${ARGN}' is '${found}' instead of '${expected}' in:\n${json}")
    endif()
endfunction()
expect("Imaginary \"GPU\"\\1, 7 SMs" device)
expect(passed steps conformance status)
expect(passed steps good status)
expect(7 steps good result figures gpu.x median)
expect("out of time" steps hanging status)
expect("failed with exit code 139" steps crashing status)
expect("not supported" steps absent status)
expect(7 steps last result figures gpu.x median)
expect("not supported" steps pytorch status)
expect("not supported" steps training status)
expect(passed steps ranks status)
expect(7 steps ranks result figures gpu.x median)
expect(passed steps decoder status)
expect(7 steps decoder result figures gpu.x median)
expect("not supported" steps slices status)
expect(passed steps server status)
expect(7 steps server result figures gpu.x median)
expect(passed steps engines status)
expect(7 steps engines result figures gpu.x median)
expect(passed steps memcheck status)
expect("failed with exit code 9" steps racecheck status)
expect("not supported" steps initcheck status)
if(NOT page MATCHES "gpu: 9 passed, 3 failed or unfinished, 5 can't be done here[^=]*not supported: one device")
    message(FATAL_ERROR "the summary is wrong:\n${page}")
endif()

# Other loads of the engines are a step of their own, and the only one if they are asked for.
execute_process(COMMAND ${RUN} --programs ${DIRECTORY} --more ${DIRECTORY}/more RESULT_VARIABLE code OUTPUT_VARIABLE page)
file(READ ${DIRECTORY}/more/gpu.json json)
file(READ ${DIRECTORY}/more/gpu.txt text)
expect(passed steps engines_more status)
expect(7 steps engines_more result figures gpu.x median)
if(NOT code EQUAL 0 OR NOT page MATCHES "gpu: 1 passed, 0 failed" OR NOT text MATCHES "inference_load_5  *1.1 x")
    message(FATAL_ERROR "exit code ${code} instead of 0, or other steps than the one:\n${page}")
endif()

# With little time left the server isn't begun: a round takes longer.
set(ENV{GPU_RUN_LIMIT} 59)
execute_process(COMMAND ${RUN} --programs ${DIRECTORY} ${DIRECTORY}/results OUTPUT_VARIABLE page)
file(READ ${DIRECTORY}/results/gpu.json json)
expect("left out: no time" steps server status)

# With no time left nothing is begun, and that is no success.
set(ENV{GPU_RUN_LIMIT} 0)
execute_process(COMMAND ${RUN} --programs ${DIRECTORY} ${DIRECTORY}/results RESULT_VARIABLE code OUTPUT_VARIABLE page)
if(NOT code EQUAL 1 OR NOT page MATCHES "gpu: 0 passed, 17 failed")
    message(FATAL_ERROR "exit code ${code} instead of 1, or a wrong summary:\n${page}")
endif()

# Without libtorch four programs and an object weren't built: a line for each says so, and it is no failure.
file(REMOVE ${DIRECTORY}/engine_figures ${DIRECTORY}/torch_figures ${DIRECTORY}/training_figures ${DIRECTORY}/gpu_server ${DIRECTORY}/python_tenants.so)
execute_process(COMMAND ${RUN} --programs ${DIRECTORY} ${DIRECTORY}/results OUTPUT_VARIABLE page)
if(NOT page MATCHES "without engines: engine_figures wasn't built" OR NOT page MATCHES "without server: gpu_server wasn't built"
   OR NOT page MATCHES "without training: python_tenants.so wasn't built" OR NOT page MATCHES "without ranks: training_figures wasn't built"
   OR NOT page MATCHES "without decoder: torch_figures wasn't built" OR NOT page MATCHES "without slices: torch_figures wasn't built"
   OR NOT page MATCHES "gpu: 0 passed, 11 failed or unfinished, 6 can't")
    message(FATAL_ERROR "it isn't said that there are neither engines, ranks nor a server:\n${page}")
endif()
