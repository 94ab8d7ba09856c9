# Written by `python -m tests.tools.completions`: change the parser, not this.

function __onebitctl_instances
    set -l config $XDG_CONFIG_HOME
    test -n "$config"; or set config $HOME/.config
    for path in /run/onebitd/*/ $XDG_RUNTIME_DIR/onebitd/*/ /etc/onebitd/*.toml $config/onebitd/*.toml
        string replace -r '\.toml$' '' (basename $path)
    end | sort -u
end

# The command and, of a group, its member; options that stand before them are passed over.
function __onebitctl_command
    set -l words
    set -l skip 0
    for word in (commandline -opc)[2..-1]
        if test $skip = 1
            set skip 0
        else if contains -- $word -i --instance --socket
            set skip 1
        else if not string match -q -- '-*' $word
            set -a words $word
        end
    end
    if test (count $words) -gt 1; and contains -- $words[1] provider state
        echo $words[1] $words[2]
    else
        echo $words[1]
    end
end

complete -c onebitctl -f
complete -c onebitctl -n 'test "$(__onebitctl_command)" = ""' -a status -d 'state, decoder, provider, lock and counters'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = ""' -a handoffs -d 'the last handoffs, and those to come'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = ""' -a requests -d 'the requests that are being served'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = ""' -a cancel -d 'end a request that is being served'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = ""' -a config -d 'the effective settings and their sources'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = ""' -a reload -d 'have the daemon read its configuration again'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = ""' -a lock -d 'who holds the NPU device lock; needs no daemon'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = ""' -a advise -d 'when a handoff pays, by prompt length'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = ""' -a provider -d 'the prefill provider: judge one, or put it back into service'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = ""' -a state -d 'look into state files, check and compare them; needs no daemon'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = ""' -a stop -d 'stop the service of an instance and its sockets'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = ""' -a disable -d 'stop them, and no longer start them at boot'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = ""' -a install-units -d 'install systemd units, man pages and links from a virtual environment'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = ""' -a uninstall-units -d 'stop all instances and remove what install-units wrote'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = ""' -s h -l help -d 'show this help message and exit'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = ""' -s i -l instance -x -a '(__onebitctl_instances)' -d 'name of the instance'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = ""' -l socket -r -F -d 'control socket, instead of a search'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = ""' -l version -d 'show program\'s version number and exit'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "status"' -s h -l help -d 'show this help message and exit'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "status"' -s i -l instance -x -a '(__onebitctl_instances)' -d 'name of the instance'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "status"' -l socket -r -F -d 'control socket, instead of a search'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "status"' -l json -d 'stable output for programs'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "handoffs"' -s h -l help -d 'show this help message and exit'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "handoffs"' -s i -l instance -x -a '(__onebitctl_instances)' -d 'name of the instance'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "handoffs"' -l socket -r -F -d 'control socket, instead of a search'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "handoffs"' -l json -d 'stable output for programs'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "handoffs"' -s n -x -d 'show the last N'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "handoffs"' -s f -l follow -d 'go on with each new one, until Ctrl-C'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "handoffs"' -l outcome -x -a 'used wasted fallback skipped failed cancelled' -d 'only those that ended so'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "requests"' -s h -l help -d 'show this help message and exit'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "requests"' -s i -l instance -x -a '(__onebitctl_instances)' -d 'name of the instance'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "requests"' -l socket -r -F -d 'control socket, instead of a search'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "requests"' -l json -d 'stable output for programs'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "cancel"' -s h -l help -d 'show this help message and exit'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "cancel"' -s i -l instance -x -a '(__onebitctl_instances)' -d 'name of the instance'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "cancel"' -l socket -r -F -d 'control socket, instead of a search'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "cancel"' -l json -d 'stable output for programs'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "config"' -s h -l help -d 'show this help message and exit'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "config"' -s i -l instance -x -a '(__onebitctl_instances)' -d 'name of the instance'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "config"' -l socket -r -F -d 'control socket, instead of a search'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "config"' -l json -d 'stable output for programs'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "reload"' -s h -l help -d 'show this help message and exit'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "reload"' -s i -l instance -x -a '(__onebitctl_instances)' -d 'name of the instance'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "reload"' -l socket -r -F -d 'control socket, instead of a search'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "reload"' -l json -d 'stable output for programs'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "lock"' -s h -l help -d 'show this help message and exit'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "lock"' -s i -l instance -x -a '(__onebitctl_instances)' -d 'name of the instance'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "lock"' -l socket -r -F -d 'control socket, instead of a search'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "lock"' -l json -d 'stable output for programs'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "lock"' -l path -x -d 'lock file'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "advise"' -s h -l help -d 'show this help message and exit'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "advise"' -s i -l instance -x -a '(__onebitctl_instances)' -d 'name of the instance'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "advise"' -l socket -r -F -d 'control socket, instead of a search'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "advise"' -l json -d 'stable output for programs'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "advise"' -l lengths -x -d 'prompt lengths to list'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "advise"' -l ctx-size -x -d 'context in tokens'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "advise"' -l plot -r -F -d 'draw the time by prompt length'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "advise"' -l provider-ms-per-token -x -d 'the provider\'s run, for each token'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "advise"' -l provider-fixed-ms -x -d 'and whatever the prompt\'s length'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "advise"' -l decoder-ms-per-token -x -d 'the decoder\'s own evaluation, for each token'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "advise"' -l decoder-fixed-ms -x -d 'and whatever the number of tokens'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "advise"' -l restore-ms-per-mib -x -d 'restoring a state file, for each MiB'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "advise"' -l kib-per-token -x -d 'size of a state file, for each token'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "advise"' -l adopt-ms -x -d 'shared route'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "advise"' -l lock-ms -x -d 'wait for the device lock'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "advise"' -l split -d 'what splitting a prompt between GPU and NPU is worth'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "advise"' -l gpu-ms-per-row -x -d 'the GPU\'s time for a row'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "advise"' -l npu-ms-per-tile -x -d 'the NPU\'s time for a tile of 256 rows'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "advise"' -l split-speedup -x -d 'the ceiling of the speed-up, instead of these two'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "advise"' -l rows -x -d 'rows of the prompt'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "advise"' -l gemm-share -x -d 'the part of prefill that a split can touch'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "provider"' -a check -d 'run a provider program through the conformance kit; needs no daemon'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "provider"' -a reset -d 'call it again after failures or drift, and forget them'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "provider"' -s h -l help -d 'show this help message and exit'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "provider check"' -s h -l help -d 'show this help message and exit'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "provider check"' -l model -x -d 'GGUF file'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "provider check"' -l elfs -x -a '(__fish_complete_directories)' -d 'passed to the provider'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "provider check"' -l llama-server -r -F -d 'the decoder to judge by'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "provider check"' -l llama-args -x -d 'more arguments for it in one string, joined with ='
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "provider check"' -l ctx-size -x -d 'its context in tokens, and so the longest prompt'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "provider check"' -l timeout -x -d 'limit for one run of the provider in seconds'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "provider check"' -l tolerance -x -d 'the largest relative error of a row that passes'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "provider check"' -l scale-tolerance -x -d 'how far the scale of a head may be from 1'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "provider check"' -l logprob-tolerance -x -d 'the largest difference of a log-probability of the first token that passes'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "provider check"' -l only -x -d 'run these cases only'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "provider check"' -l keep -x -a '(__fish_complete_directories)' -d 'keep the files of each case in this new directory'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "provider check"' -l json -d 'stable output for programs'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "provider check"' -F
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "provider reset"' -s h -l help -d 'show this help message and exit'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "provider reset"' -s i -l instance -x -a '(__onebitctl_instances)' -d 'name of the instance'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "provider reset"' -l socket -r -F -d 'control socket, instead of a search'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "provider reset"' -l json -d 'stable output for programs'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "state"' -a show -d 'what a state file holds'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "state"' -a check -d 'whether the daemon would take a state file'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "state"' -a diff -d 'how far a state file is from a reference, and why'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "state"' -s h -l help -d 'show this help message and exit'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "state show"' -s h -l help -d 'show this help message and exit'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "state show"' -l json -d 'stable output for programs'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "state show"' -l ids -d 'list the token ids, too'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "state show"' -l values -d 'read all values, and tell the range of each tensor'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "state show"' -F
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "state check"' -s h -l help -d 'show this help message and exit'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "state check"' -l json -d 'stable output for programs'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "state check"' -l tokens -r -F -d 'ids file that it must hold'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "state check"' -l like -r -F -d 'a state file that the decoder saved, such as the daemon\'s slots/example.state'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "state check"' -l model -r -F -d 'the model, which tells the size of a sliding window'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "state check"' -l swa-window -x -d 'the size of the sliding window in tokens, without --model'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "state check"' -F
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "state diff"' -s h -l help -d 'show this help message and exit'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "state diff"' -l json -d 'stable output for programs'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "state diff"' -l tolerance -x -d 'the largest relative error of a row that passes'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "state diff"' -l scale-tolerance -x -d 'how far the size of a head may be from the reference\'s, relatively'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "state diff"' -l model -r -F -d 'the model, which tells how many values a head has'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "state diff"' -l head-dim -x -d 'so many, without --model'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "state diff"' -l positions -x -d 'only positions A to B - 1'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "state diff"' -l all -d 'list every tensor, not just those that are off'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "state diff"' -l plot -r -F -d 'draw the error by layer and position'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "state diff"' -F
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "stop"' -s h -l help -d 'show this help message and exit'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "stop"' -s i -l instance -x -a '(__onebitctl_instances)' -d 'name of the instance'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "disable"' -s h -l help -d 'show this help message and exit'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "disable"' -s i -l instance -x -a '(__onebitctl_instances)' -d 'name of the instance'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "install-units"' -s h -l help -d 'show this help message and exit'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "install-units"' -l prefix -x -a '(__fish_complete_directories)' -d 'where the files are, or go to'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "install-units"' -l root -x -a '(__fish_complete_directories)' -d 'work on the tree of another machine, such as an image that is being built'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "install-units"' -l enable -x -a '(__onebitctl_instances)' -d 'start this instance now and at boot'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "uninstall-units"' -s h -l help -d 'show this help message and exit'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "uninstall-units"' -l prefix -x -a '(__fish_complete_directories)' -d 'where the files are, or go to'
complete -c onebitctl -n 'test "$(__onebitctl_command)" = "uninstall-units"' -l root -x -a '(__fish_complete_directories)' -d 'work on the tree of another machine, such as an image that is being built'
