//go:build !amd64

package microvm

// tscKHz is 0: the driver knows one processor architecture only.
func tscKHz() int64 { return 0 }
