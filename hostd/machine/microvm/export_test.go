package microvm

// SetClass makes a driver that of a host whose QEMU or processor is another.
func (d *Driver) SetClass(class string) { d.class = class }
