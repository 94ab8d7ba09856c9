# Written by `python -m tests.tools.completions`: change the parser, not this.

function __onebitd_instances
    set -l config $XDG_CONFIG_HOME
    test -n "$config"; or set config $HOME/.config
    for path in /etc/onebitd/*.toml $config/onebitd/*.toml
        string replace -r '\.toml$' '' (basename $path)
    end | sort -u
end

complete -c onebitd -f
complete -c onebitd -s h -l help -d 'show this help message and exit'
complete -c onebitd -l instance -x -a '(__onebitd_instances)' -d 'read /etc/onebitd/NAME.toml'
complete -c onebitd -l config -r -F -d 'read FILE'
complete -c onebitd -s m -l model -r -F -d 'GGUF file to serve'
complete -c onebitd -l alias -x -d 'model name that clients see'
complete -c onebitd -l device -x -a 'hybrid hrx cpu' -d 'hybrid'
complete -c onebitd -l prefill-provider -r -F -d 'prefill provider program'
complete -c onebitd -l llama-server -r -F -d 'llama-server program, a path or a name in PATH'
complete -c onebitd -l host -x -d 'public address'
complete -c onebitd -l port -x -d 'public port'
complete -c onebitd -l ctx-size -x -d 'context size in tokens'
complete -c onebitd -l print-backend -d 'print the exact llama-server command line, shell-quoted, and exit'
complete -c onebitd -l check-config -d 'print every problem of the configuration at once'
complete -c onebitd -l version -d 'print the version'
